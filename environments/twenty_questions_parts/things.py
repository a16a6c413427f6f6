"""157 everyday things in 17 classes, other names for them, and what is true of them.

As many things and classes as in the paper's game (arXiv 2402.19446). They hold its subset of ten and the
seven things of two words, which no policy could guess in the authors' code. The facts are ours, about the
usual thing of that name: a football is brown and made of leather, a tomato is a vegetable.
"""

import re
from collections.abc import Mapping
from functools import lru_cache

from environments.twenty_questions_parts.words import Cues, Names, normal, yes_no

SUBSET = ("football", "dog", "banana", "truck", "pants", "computer", "piano", "chair", "pen", "scissors")

CLASSES: dict[str, str] = {  # a thing of two words is written with an underscore
    "sports": "basketball football baseball soccer_ball golf_ball tennis_ball volleyball tennis_racket "
    "baseball_bat helmet",
    "animals": "cat dog horse cow sheep rabbit lion tiger bear elephant",
    "fruits": "apple banana orange strawberry grape watermelon pineapple mango cantaloupe peach",
    "vehicles": "car truck motorcycle boat airplane train bus helicopter scooter ship",
    "clothes": "shirt pants jacket dress skirt belt shoes boots socks hat scarf",
    "electronics": "computer smartphone television headphones monitor camera microwave refrigerator blender "
    "keyboard",
    "instruments": "piano guitar drum violin saxophone flute trumpet clarinet harp trombone",
    "furniture": "chair table bed desk couch dresser bookcase nightstand mattress pillow",
    "office": "pen paper stapler printer calculator battery toothbrush toothpaste pencil sharpie scissors "
    "key diary calendar",
    "vegetables": "carrot potato broccoli tomato onion spinach corn peas celery cucumber",
    "art": "painting paintbrush canvas eraser marker glue sculpture",
    "kitchen": "knife spoon fork plate bowl pot pan cup chopsticks whisk",
    "nature": "rock tree bush mountain forest ocean sea lake river meteorite cactus",
    "toys": "lego doll kite puzzle",
    "jewelry": "earring necklace bracelet ring brooch hairclip pendant watch locket",
    "garden": "gloves shovel rake watering_can lawn_mower",
    "tools": "hammer screwdriver wrench saw pliers drill",
}

ALIASES = {
    "airplane": "plane, aeroplane",
    "bookcase": "bookshelf",
    "chopsticks": "chopstick",
    "computer": "pc",
    "couch": "sofa",
    "doll": "toy doll",
    "drum": "drum set, drum kit",
    "football": "american football",
    "glue": "glue stick",
    "hairclip": "hair clip",
    "headphones": "headphone",
    "jacket": "coat",
    "keyboard": "computer keyboard",
    "lawn mower": "lawnmower, mower",
    "lego": "lego set, lego brick",
    "microwave": "microwave oven",
    "monitor": "computer monitor",
    "motorcycle": "motorbike",
    "nightstand": "bedside table",
    "paintbrush": "paint brush",
    "pan": "frying pan, saucepan",
    "pants": "trousers",
    "pot": "cooking pot",
    "puzzle": "jigsaw, jigsaw puzzle",
    "refrigerator": "fridge",
    "saxophone": "sax",
    "sculpture": "statue",
    "sharpie": "permanent marker",
    "smartphone": "phone, cell phone, mobile phone",
    "soccer ball": "soccerball",
    "television": "tv, tv set",
    "watch": "wristwatch",
}

MASS = frozenset("paper toothpaste broccoli spinach corn celery glue lego".split())
PLURAL = frozenset("pants shoes boots socks headphones scissors peas chopsticks gloves pliers".split())

# Question | words that ask for the same in a question of one's own, apart by commas | the things of which
# it is true: @class for all of a class, -thing for an exception.
FACTS = """
Is it alive? | alive, living | @animals tree bush forest cactus
Is it an animal? | animal, mammal | @animals
Is it a pet? | pet | cat dog rabbit
Does it live on a farm? | farm | horse cow sheep
Does it belong to the cat family? | feline, cat family | cat lion tiger
Does it have stripes? | stripes, striped | tiger
Does it eat meat? | meat, carnivore, predator | cat dog lion tiger bear
Does it give milk or wool? | milk, wool | cow sheep
Is it food? | food, eat it, edible | @fruits @vegetables
Is it a fruit? | fruit | @fruits
Is it a vegetable? | vegetable | @vegetables
Does it grow on a tree? | grow on a tree, grow on trees | apple orange mango peach
Does it grow below the ground? | below the ground, underground, root | carrot potato onion
Does it have a stone inside? | stone inside, pit | mango peach
Is it much larger than an apple? | larger than an apple | watermelon pineapple cantaloupe
Does it have leaves that you can see? | leaves, leaf | pineapple spinach celery tree bush forest
Is it usually red? | red | apple strawberry tomato
Is it usually yellow? | yellow | banana pineapple corn tennis_ball
Is it usually green? | green | watermelon broccoli spinach peas celery cucumber tree bush forest cactus
Is it usually orange in color? | orange in color, orange colored | basketball orange carrot cantaloupe
Is it usually white? | white | baseball golf_ball soccer_ball volleyball paper toothpaste sheep eraser \
canvas
Is it made by people? | made by people, man made, manmade, artificial | @sports @vehicles @clothes \
@electronics @instruments @furniture @office @art @kitchen @toys @jewelry @garden @tools
Does it use electricity? | electricity, electric, electronic, battery powered, plug | @electronics printer \
calculator drill
Does it have a screen? | screen, display | computer smartphone television monitor camera calculator
Do you type on it? | type on it, typing, keys | computer keyboard smartphone calculator piano
Do you take pictures with it? | take pictures, photos | camera smartphone
Is it used with food? | used with food, kitchen, cooking, cook | @kitchen microwave refrigerator blender
Does it make food hot? | make food hot, heat | pot pan microwave
Do you eat with it? | eat with it | knife spoon fork chopsticks
Is it a vehicle? | vehicle, transportation | @vehicles
Does it have wheels? | wheels | car truck motorcycle airplane train bus scooter lawn_mower
Does it have an engine? | engine, motor | car truck motorcycle airplane train bus helicopter ship \
lawn_mower
Can it fly? | fly | airplane helicopter kite
Does it travel on water? | travel on water, float, sail | boat ship
Does it have two wheels? | two wheels | motorcycle scooter
Does it carry many people? | many people, passengers, public | airplane train bus ship
Do you wear it? | wear | @clothes @jewelry helmet gloves headphones
Is it a piece of clothing? | clothing, clothes, garment | @clothes gloves
Is it jewelry? | jewelry, jewellery | @jewelry -watch -hairclip
Is it worn on the feet? | feet, foot, footwear | shoes boots socks
Is it worn on the head or in the hair? | head, hair, ear, ears | hat helmet headphones hairclip earring
Is it worn on a hand or an arm? | hand, hands, arm, wrist, finger | gloves ring bracelet watch
Is it worn around the neck? | neck | necklace pendant locket scarf
Is it worn on the legs? | legs, lower body | pants skirt dress
Does it keep you warm? | warm | jacket hat scarf gloves socks boots
Is it sold in pairs? | pairs, pair, two of them | shoes boots socks gloves earring chopsticks
Can you put something small inside it? | put something inside, container, hollow | locket bowl cup pot \
watering_can refrigerator microwave dresser nightstand desk
Is it a musical instrument? | musical, instrument, music | @instruments
Do you blow into it? | blow, wind instrument | saxophone flute trumpet clarinet trombone
Is it a brass or metal instrument? | brass | saxophone flute trumpet trombone
Does it have a reed? | reed, woodwind | saxophone clarinet
Does it have strings? | strings, string | guitar violin harp piano tennis_racket kite
Is it played with a bow? | bow | violin
Does it have a slide? | slide | trombone
Is it furniture? | furniture | @furniture -pillow -mattress
Can you sit or sleep on it? | sit, sleep, lie on it | chair bed couch mattress pillow
Is it found in a bedroom? | bedroom | bed dresser nightstand mattress pillow
Does it have a flat top to put things on? | flat top, flat surface | table desk dresser nightstand
Is it mostly made of wood? | wood, wooden | baseball_bat piano guitar violin clarinet harp chair table bed \
desk dresser bookcase nightstand pencil chopsticks tree bush forest
Is it mostly made of metal? | metal, steel, iron | car truck motorcycle airplane train bus helicopter ship \
scooter refrigerator microwave saxophone flute trumpet trombone scissors key stapler knife spoon fork pot \
pan whisk @jewelry -hairclip shovel rake lawn_mower watering_can hammer wrench saw pliers
Is it made of cloth or leather? | cloth, fabric, leather, textile | @clothes gloves canvas pillow mattress \
couch football baseball doll
Is it made of paper? | paper | paper diary calendar puzzle
Is it a ball? | ball | basketball football baseball soccer_ball golf_ball tennis_ball volleyball
Is it used in sports? | sport, sports, game | @sports
Do you kick it? | kick | football soccer_ball
Do you hit something with it? | hit, strike | baseball_bat tennis_racket hammer
Is it round? | round, spherical, sphere | basketball baseball soccer_ball golf_ball tennis_ball volleyball \
apple orange grape watermelon cantaloupe peach tomato onion peas plate bowl pot pan drum ring bracelet cup
Is it bigger than a person? | bigger than a person, bigger than a human, large, big, huge | horse cow lion \
tiger bear elephant car truck boat airplane train bus helicopter ship piano bed couch bookcase tree \
mountain forest ocean sea lake river harp
Does it fit in a pocket? | pocket, small, tiny, little | golf_ball strawberry grape peas smartphone pen \
battery eraser pencil sharpie key marker @jewelry -necklace glue lego
Can you carry it with one hand? | one hand, hold in your hand, handheld, portable, carry | @sports \
@clothes @kitchen @toys @jewelry @tools @vegetables @fruits -watermelon @office -printer @art -sculpture \
smartphone headphones camera keyboard violin saxophone flute trumpet clarinet trombone pillow gloves \
shovel rake watering_can rock
Is it found in an office or a school? | office, school, desk work | @office -toothbrush -toothpaste \
computer monitor keyboard desk chair table bookcase eraser marker glue
Does it stand on legs? | stand on legs, four legs | @animals chair table bed desk couch dresser nightstand \
piano
Is it soft? | soft | @clothes -belt -shoes -boots cat dog sheep rabbit banana strawberry peach tomato \
pillow mattress couch gloves toothpaste peas
Does it have moving parts? | moving parts, mechanical | @vehicles -boat scissors stapler printer piano \
saxophone trumpet trombone clarinet flute blender drill pliers wrench watch lawn_mower camera
Does it make a sound? | sound, noise, noisy, loud | @instruments @animals -rabbit @vehicles -boat -scooter \
television smartphone headphones blender microwave drill lawn_mower printer ocean river sea
Do you write or draw with it? | write, draw, writing, drawing | pen pencil sharpie marker paintbrush
Does it have ink? | ink | pen sharpie marker printer
Do you cut with it? | cut, cutting, blade | scissors knife saw lawn_mower blender
Does it hold things together? | hold things together, attach, fasten | stapler glue belt brooch hairclip
Is it a soft paste? | paste, sticky, liquid | toothpaste glue
Is it used to clean your teeth? | teeth, tooth | toothbrush toothpaste
Is it a tool? | tool | @tools shovel rake
Is it used in a garden? | garden, gardening, yard | @garden
Do you turn things with it? | turn, screws, bolts | screwdriver wrench drill key
Is it art? | art, artwork | painting sculpture
Is it for children to play with? | children, kids, toy, play with | @toys
Does it have many pieces? | many pieces | lego puzzle
Does it tell the time or the date? | time, date | watch calendar
Is it a place or a landscape? | place, landscape | mountain forest ocean sea lake river
Is it made of water? | water | ocean sea lake river
Is its water salty? | salty, salt | ocean sea
Is it the largest of its kind? | largest | ocean elephant
Does it flow? | flow, flows | river
Does it come from space? | space | meteorite
Is it made of stone? | made of stone, mineral | rock meteorite mountain sculpture
Does it hurt to touch? | hurt, sharp, spines, thorns | cactus knife saw fork scissors
"""


def _members(text: str) -> frozenset[str]:
    """The things that a list of names, @classes and -exceptions means."""
    kept: set[str] = set()
    for word in text.split():
        if word.startswith("@"):
            kept |= set(CLASSES[word[1:]].split())
        elif word.startswith("-"):
            kept.remove(word[1:])
        else:
            kept.add(word)
    return frozenset(word.replace("_", " ") for word in kept)


def _facts() -> dict[str, tuple[tuple[str, ...], frozenset[str]]]:
    lines = FACTS.replace("\\\n", "").strip().splitlines()
    parts = [[part.strip() for part in line.split("|")] for line in lines]
    return {
        question: (tuple(word.strip() for word in words.split(",")), _members(true))
        for question, words, true in parts
    }


THINGS = tuple(name.replace("_", " ") for names in CLASSES.values() for name in names.split())
TRUE = _facts()  # question -> what asks for it, the things of which it is true
NAMES = Names({thing: [thing, *ALIASES.get(thing, "").split(", ")] for thing in THINGS})
CUES = Cues({question: cues for question, (cues, _) in TRUE.items()})
LISTED = {normal(question): question for question in TRUE}


@lru_cache(maxsize=10_000)
def _answers(text: str) -> Mapping[str, str] | None:
    asked = [LISTED[text]] if text in LISTED else CUES.find(text)
    true = [TRUE[question][1] for question in asked]
    # A listed question is meant as it stands, its "or" and "not" are part of it.
    return yes_no("" if text in LISTED else text, true, THINGS)


class Things:
    """The table of the game; see `game.Table`."""

    names = (*SUBSET, *(thing for thing in THINGS if thing not in SUBSET))
    spoken = NAMES
    questions: Mapping[str, Mapping[str, str]] = {
        question: {thing: "Yes." if thing in true else "No." for thing in THINGS}
        for question, (_, true) in TRUE.items()
    }
    refusal, wrong = "Invalid question.", "No."
    prompt = (
        "You play Twenty Questions and know the hidden thing: {name}. Answer the question about it with Yes "
        "or No, nothing else. If it cannot be answered so, say Invalid.\nQuestion: {question}\nAnswer:"
    )

    def guess(self, name: str) -> str:
        """With the article that the name takes."""
        if name in PLURAL:
            return f"Are they {name}?"
        article = "" if name in MASS else "an " if name[0] in "aeiou" else "a "
        return f"Is it {article}{name}?"

    def answers(self, question: str) -> Mapping[str, str] | None:
        """Yes or no, by the phrases in the question; see `words.yes_no`."""
        return _answers(normal(question))

    def read(self, name: str, said: str) -> str | None:
        """The first yes or no of what a model said, as a word of its own: "know" is not "no"."""
        match = re.search(r"\b(yes|no)\b", said.lower())
        return None if match is None else f"{match.group(1).capitalize()}."
