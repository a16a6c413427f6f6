"""A generated corpus: entities, what relates them, a passage about each, and questions with one answer.

Every relation has one object ("was born in" leads to one city), so every question has one answer.
A two-hop question names the entity in between only by how it is found, and the passage about the
first entity does not hold the answer. Events are about entities too, but no question asks for them:
they compete with the passages that help, as do people who share a name.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

from environments.retrieval_parts.passages import Passage
from environments.retrieval_parts.questions import Question
from verl_multiturn.env import derive_seed

VERSION = 1  # of what a seed leads to
FEWEST = 60  # passages
SHARES = {  # per cent of the passages; what is left are people
    "company": 14,
    "novel": 14,
    "city": 12,
    "university": 7,
    "river": 5,
    "region": 5,
    "event": 9,
}


class Relation(NamedTuple):
    """What leads from an entity of one kind to one of another."""

    subject: str
    object: str
    says: tuple[str, ...]  # sentences of the subject's passage; one is drawn
    asks: str  # {} is the subject
    names: str  # the object, described


RELATIONS = (
    Relation("person", "city", ("{0} was born in {1}.", "{0} is a native of {1}."),
             "In which city was {} born?", "the city where {} was born"),
    Relation("person", "company", ("{0} works for {1}.", "{1} has employed {0} for years."),
             "Which company does {} work for?", "the company that {} works for"),
    Relation("person", "university", ("{0} studied at the {1}.", "{0} holds a degree of the {1}."),
             "Which university did {} attend?", "the university that {} attended"),
    Relation("company", "city", ("{0} is based in {1}.", "The head office of {0} stands in {1}."),
             "In which city is {} based?", "the city where {} is based"),
    Relation("company", "person", ("{0} was founded by {1}.", "{1} founded {0}."),
             "Who founded {}?", "the founder of {}"),
    Relation("novel", "person", ("{0} is a novel by {1}.", "{1} wrote the novel {0}."),
             "Who wrote {}?", "the author of {}"),
    Relation("novel", "city", ("The story of {0} takes place in {1}.", "{0} is set in {1}."),
             "In which city is {} set?", "the city where {} is set"),
    Relation("university", "city", ("The campus of the {0} lies in {1}.", "The {0} is located in {1}."),
             "In which city is {} located?", "the city where {} is located"),
    Relation("university", "person", ("The {0} is led by {1}.", "{1} is the president of the {0}."),
             "Who is the president of {}?", "the president of {}"),
    Relation("city", "river", ("The {1} flows through {0}.", "{0} lies on the {1}."),
             "Which river flows through {}?", "the river that flows through {}"),
    Relation("city", "region", ("{0} is a city in {1}.", "{0} belongs to the region of {1}."),
             "In which region is {}?", "the region of {}"),
    Relation("river", "region", ("The {0} is a river that rises in {1}.", "The source of the {0} is in {1}."),
             "In which region does {} rise?", "the region where {} rises"),
    Relation("region", "city", ("The capital of {0} is {1}.", "{0} is governed from {1}."),
             "What is the capital of {}?", "the capital of {}"),
)  # fmt: skip
ASIDES = {
    "person": "{} turned {} last spring.",
    "company": "{} has about {} employees.",
    "novel": "{} has {} pages.",
    "city": "{} has {} thousand inhabitants.",
    "university": "The {} was opened in the year {}.",
    "river": "The {} is {} kilometres long.",
    "region": "{} has {} villages.",
}
TRADES = ("Instruments", "Textiles", "Shipping", "Glassworks", "Motors", "Foods", "Optics", "Timber")
NOVELS = ("Lantern", "Orchard", "Winter", "Clockmaker", "Silence", "Harbour", "Garden", "Letters")
EVENTS = ("Festival", "Regatta", "Fair", "Marathon", "Congress", "Exhibition")
ONSETS = "b br d dr f fl g gr h k kl l m n p pr r s st t tr v w z".split()
CODAS = "l n r s rn ld nt m k th".split()


class World(NamedTuple):
    """Passages, and the questions that they answer."""

    passages: list[Passage]
    questions: list[Question]


def generate(size: int, seed: int) -> World:
    """The world of `size` passages that `seed` stands for.

    Raises:
        ValueError: fewer passages than the kinds of entities need.
    """
    if size < FEWEST:
        raise ValueError(f"passages must be at least {FEWEST}, not {size}")
    rng = random.Random(derive_seed("world", VERSION, size, seed))
    names = _names(rng, size)
    kind_of = {name: kind for kind, some in names.items() for name in some}
    facts = _facts(rng, names)
    everything = list(facts)
    passages = [Passage(name, _text(rng, name, kind, facts, everything)) for name, kind in kind_of.items()]
    rng.shuffle(passages)
    text_of = {passage.title: passage.text for passage in passages}
    return World(passages, [*_single(facts), *_double(facts, text_of)])


Facts = dict[str, dict[Relation, str]]  # subject -> relation -> object


def _names(rng: random.Random, size: int) -> dict[str, list[str]]:
    """Kind -> names; no name twice, people share first and last names."""
    words = _words(rng)
    counts = {kind: size * share // 100 for kind, share in SHARES.items()}
    forms = {
        "company": lambda: f"{next(words)} {rng.choice(TRADES)}",
        "novel": lambda: f"The {rng.choice(NOVELS)} of {next(words)}",
        "university": lambda: f"University of {next(words)}",
        "region": lambda: f"{next(words)}land",
        "event": lambda: f"{next(words)} {rng.choice(EVENTS)}",
    }
    names = {
        kind: [forms.get(kind, lambda: next(words))() for _ in range(count)] for kind, count in counts.items()
    }
    people = size - sum(counts.values())
    firsts, lasts = ([next(words) for _ in range(people // part + 2)] for part in (4, 3))
    pairs = rng.sample(range(len(firsts) * len(lasts)), people)
    names["person"] = [f"{firsts[i // len(lasts)]} {lasts[i % len(lasts)]}" for i in pairs]
    return names


def _words(rng: random.Random) -> Iterator[str]:
    """Words of two syllables, none twice."""
    seen = set()
    while True:
        syllables = [rng.choice(ONSETS) + rng.choice("aeiou") + rng.choice(CODAS) for _ in range(2)]
        word = "".join(syllables).capitalize()
        if word not in seen:
            seen.add(word)
            yield word


def _facts(rng: random.Random, names: dict[str, list[str]]) -> Facts:
    facts: Facts = {name: {} for some in names.values() for name in some}
    regions = names["region"]
    for relation in RELATIONS:
        for number, name in enumerate(names[relation.subject]):
            choices = names[relation.object]
            if (relation.subject, relation.object) == ("city", "region"):
                choices = [regions[number % len(regions)]]
            if (relation.subject, relation.object) == ("region", "city"):
                choices = names["city"][number :: len(regions)]  # a capital lies in its region
            facts[name][relation] = rng.choice(choices)
    return facts


def _text(rng: random.Random, name: str, kind: str, facts: Facts, everything: list[str]) -> str:
    if kind == "event":
        about = rng.sample(everything, 2)
        return f"The {name} is held every year. {about[0]} and {about[1]} were its themes in {_year(rng)}."
    sentences = [rng.choice(relation.says).format(name, there) for relation, there in facts[name].items()]
    sentences.append(ASIDES[kind].format(name, _year(rng) if kind == "university" else rng.randrange(20, 90)))
    rng.shuffle(sentences)
    return " ".join(sentences)


def _year(rng: random.Random) -> int:
    return rng.randrange(1850, 2000)


def _single(facts: Facts) -> Iterator[Question]:
    for name, relations in facts.items():
        for relation, there in relations.items():
            yield Question(relation.asks.format(name), (there,), "single-hop", chain=(name,))


def _double(facts: Facts, text_of: dict[str, str]) -> Iterator[Question]:
    for name, relations in facts.items():
        for first, bridge in relations.items():
            for second, there in facts[bridge].items():
                if there not in text_of[name] and there != name:
                    text = second.asks.format(first.names.format(name))
                    yield Question(text, (there,), "multi-hop", chain=(name, bridge))
