"""96 large or well-known cities, and what is true of them, from general knowledge.

Rough on purpose: one language, one kind of weather and one sight for each, people counted with the suburbs.
The facts serve a game; where two views are possible (Jakarta, Bern), the commoner one is taken.
"""

import re
from collections.abc import Mapping
from functools import lru_cache

from environments.twenty_questions_parts.words import Cues, Names, normal, yes_no

# City, other names | country | part of the world | language | weather | known for | people: 1 fewer than two
# million, 2 two to five, 3 five to ten, 4 more than ten | C capital, S by the sea, R large river, I island,
# M high mountains in sight, O Summer Olympic Games, E south of the equator
CITIES = """
Accra | Ghana | Africa | English | hot and humid | markets | 2 | CS
Addis Ababa | Ethiopia | Africa | Amharic | mild | museums | 3 | CM
Algiers | Algeria | Africa | Arabic | dry in summer | an old town | 2 | CS
Amsterdam | Netherlands | Europe | Dutch | mild | canals | 2 | CSO
Athens | Greece | Europe | Greek | dry in summer | temples | 2 | CSO
Atlanta | United States | North America | English | hot and humid | its airport | 3 | O
Auckland | New Zealand | Oceania | English | mild | its harbor | 1 | SIE
Baghdad | Iraq | Asia | Arabic | hot and dry | markets | 3 | CR
Bangkok | Thailand | Asia | Thai | hot and humid | temples | 4 | CR
Barcelona | Spain | Europe | Spanish | dry in summer | churches | 3 | SO
Beijing, Peking | China | Asia | Chinese | cold in winter | palaces | 4 | CO
Beirut | Lebanon | Asia | Arabic | dry in summer | its harbor | 2 | CSM
Berlin | Germany | Europe | German | cold in winter | museums | 2 | CRO
Bogota | Colombia | South America | Spanish | mild | museums | 4 | CM
Boston | United States | North America | English | cold in winter | universities | 2 | SR
Brasilia | Brazil | South America | Portuguese | hot and humid | modern buildings | 2 | CE
Brussels | Belgium | Europe | French | mild | the European Union | 2 | C
Budapest | Hungary | Europe | Hungarian | cold in winter | thermal baths | 2 | CR
Buenos Aires | Argentina | South America | Spanish | mild | dance | 4 | CSRE
Cairo | Egypt | Africa | Arabic | hot and dry | pyramids | 4 | CR
Cape Town | South Africa | Africa | English | dry in summer | a flat mountain | 2 | SME
Casablanca | Morocco | Africa | Arabic | dry in summer | mosques | 2 | S
Chicago | United States | North America | English | cold in winter | skyscrapers | 3 | R
Copenhagen | Denmark | Europe | Danish | mild | its harbor | 1 | CSI
Dakar | Senegal | Africa | French | hot and dry | its harbor | 2 | CS
Delhi, New Delhi | India | Asia | Hindi | hot and dry | mosques | 4 | CR
Denver | United States | North America | English | cold in winter | skiing | 2 | M
Dubai | United Arab Emirates | Asia | Arabic | hot and dry | skyscrapers | 2 | S
Dublin | Ireland | Europe | English | mild | pubs | 1 | CSI
Edinburgh | United Kingdom | Europe | English | mild | a castle | 1 | S
Frankfurt | Germany | Europe | German | mild | banks | 2 | R
Geneva | Switzerland | Europe | French | cold in winter | international organizations | 1 | RM
Hamburg | Germany | Europe | German | mild | its harbor | 2 | R
Hanoi | Vietnam | Asia | Vietnamese | hot and humid | an old town | 3 | CR
Havana | Cuba | North America | Spanish | hot and humid | old cars | 2 | CSI
Helsinki | Finland | Europe | Finnish | cold in winter | saunas | 1 | CSO
Ho Chi Minh City, Saigon | Vietnam | Asia | Vietnamese | hot and humid | markets | 4 | R
Hong Kong | China | Asia | Chinese | hot and humid | skyscrapers | 3 | SI
Honolulu | United States | North America | English | hot and humid | beaches | 1 | SI
Houston | United States | North America | English | hot and humid | spaceflight | 3 | 
Istanbul | Turkey | Europe | Turkish | dry in summer | mosques | 4 | S
Jakarta | Indonesia | Asia | Indonesian | hot and humid | heavy traffic | 4 | CSIE
Jerusalem | Israel | Asia | Hebrew | dry in summer | holy places | 1 | C
Johannesburg | South Africa | Africa | English | mild | gold mines | 3 | E
Kathmandu | Nepal | Asia | Nepali | mild | temples | 1 | CM
Kyiv, Kiev | Ukraine | Europe | Ukrainian | cold in winter | churches | 2 | CR
Kyoto | Japan | Asia | Japanese | hot and humid | temples | 1 | I
Lagos | Nigeria | Africa | English | hot and humid | markets | 4 | S
Las Vegas | United States | North America | English | hot and dry | casinos | 2 | M
Lima | Peru | South America | Spanish | mild | food | 4 | CSE
Lisbon | Portugal | Europe | Portuguese | dry in summer | old trams | 2 | CSR
London | United Kingdom | Europe | English | mild | a clock tower | 4 | CRIO
Los Angeles | United States | North America | English | dry in summer | films | 4 | SMO
Madrid | Spain | Europe | Spanish | hot and dry | museums | 3 | C
Manila | Philippines | Asia | Filipino | hot and humid | an old town | 4 | CSI
Marrakesh, Marrakech | Morocco | Africa | Arabic | hot and dry | markets | 1 | M
Mecca | Saudi Arabia | Asia | Arabic | hot and dry | holy places | 2 | 
Melbourne | Australia | Oceania | English | mild | sports | 3 | SOE
Mexico City | Mexico | North America | Spanish | mild | ancient ruins | 4 | CMO
Miami | United States | North America | English | hot and humid | beaches | 3 | S
Milan | Italy | Europe | Italian | cold in winter | fashion | 2 | 
Montreal | Canada | North America | French | cold in winter | festivals | 2 | RIO
Moscow | Russia | Europe | Russian | cold in winter | a fortress | 4 | CRO
Mumbai, Bombay | India | Asia | Hindi | hot and humid | films | 4 | S
Munich | Germany | Europe | German | cold in winter | beer | 2 | RO
Nairobi | Kenya | Africa | Swahili | mild | wild animals | 3 | CE
Naples | Italy | Europe | Italian | dry in summer | a volcano | 2 | S
New Orleans | United States | North America | English | hot and humid | jazz | 1 | R
New York, New York City | United States | North America | English | cold in winter | skyscrapers | 4 | SRI
Osaka | Japan | Asia | Japanese | hot and humid | food | 4 | SI
Oslo | Norway | Europe | Norwegian | cold in winter | museums | 1 | CS
Paris | France | Europe | French | mild | an iron tower | 4 | CRO
Philadelphia | United States | North America | English | cold in winter | a bell | 3 | R
Prague | Czech Republic | Europe | Czech | cold in winter | a castle | 2 | CR
Reykjavik | Iceland | Europe | Icelandic | cold in winter | hot springs | 1 | CSI
Rio de Janeiro, Rio | Brazil | South America | Portuguese | hot and humid | carnival | 4 | SMOE
Rome | Italy | Europe | Italian | dry in summer | ancient ruins | 2 | CRO
St Petersburg, Saint Petersburg | Russia | Europe | Russian | cold in winter | palaces | 3 | SR
San Francisco | United States | North America | English | dry in summer | a red bridge | 2 | S
Santiago | Chile | South America | Spanish | dry in summer | wine | 3 | CME
Sao Paulo | Brazil | South America | Portuguese | mild | heavy traffic | 4 | E
Seattle | United States | North America | English | mild | a futuristic tower | 2 | SM
Seoul | South Korea | Asia | Korean | cold in winter | palaces | 4 | CRO
Shanghai | China | Asia | Chinese | hot and humid | skyscrapers | 4 | SR
Singapore | Singapore | Asia | English | hot and humid | its harbor | 3 | CSI
Stockholm | Sweden | Europe | Swedish | cold in winter | islands | 2 | CSIO
Sydney | Australia | Oceania | English | mild | an opera house | 3 | SOE
Tehran | Iran | Asia | Persian | hot and dry | markets | 3 | CM
Tokyo | Japan | Asia | Japanese | hot and humid | busy crossings | 4 | CSIO
Toronto | Canada | North America | English | cold in winter | a very high tower | 3 | 
Vancouver | Canada | North America | English | mild | skiing | 2 | SRM
Venice | Italy | Europe | Italian | dry in summer | canals | 1 | SI
Vienna | Austria | Europe | German | cold in winter | classical music | 2 | CR
Warsaw | Poland | Europe | Polish | cold in winter | an old town | 2 | CR
Washington, Washington DC | United States | North America | English | hot and humid | a white house | 3 | CR
Zurich | Switzerland | Europe | German | cold in winter | banks | 1 | RM
"""
PEOPLE = {
    "1": "Fewer than two million people live there.",
    "2": "Two to five million people live there.",
    "3": "Five to ten million people live there.",
    "4": "More than ten million people live there.",
}
FLAGS = {  # letter -> question, what asks for the same
    "C": ("Is it the capital of its country?", "capital, seat of government"),
    "S": ("Is it by the sea?", "sea, ocean, coast, coastal, port, beach nearby"),
    "R": ("Does a large river flow through it?", "river"),
    "I": ("Is it on an island?", "island"),
    "M": ("Are high mountains in sight?", "mountains, mountain"),
    "O": ("Has it hosted the Summer Olympic Games?", "olympic, olympics, olympic games"),
    "E": ("Is it south of the equator?", "south of the equator, southern hemisphere"),
}
OPEN = {  # column -> question, what asks for the same in a question with what, which, where or how
    2: ("In which part of the world is it?", "part of the world, continent, region, where, located"),
    3: ("What language do most people speak there?", "language, languages, speak, spoken"),
    4: ("What is the weather like?", "weather, climate, temperature, hot, warm, cold"),
    5: (
        "What is it known for?",
        "known for, famous for, landmark, sights, attraction, attractions, see there",
    ),
    6: ("How many people live there?", "how many people, population, how big, how large, size"),
}
WEATHER = {  # word -> kinds of weather that it fits
    "hot": ("hot and dry", "hot and humid"),
    "humid": ("hot and humid",),
    "dry": ("hot and dry", "dry in summer"),
    "cold": ("cold in winter",),
}
SAYS = {2: "It is in {}.", 3: "They mostly speak {}.", 4: "It is {}.", 5: "It is known for {}."}

_ROWS = [[part.strip() for part in line.split("|")] for line in CITIES.strip().splitlines()]
ROWS = {row[0].split(",")[0]: row for row in _ROWS}
COUNTRIES = {row[1] for row in _ROWS} - {"Singapore"}


def _true() -> dict[str, tuple[list[str], frozenset[str]]]:
    """Yes-or-no question -> what asks for it, the cities of which it is true."""
    found = {
        question: (cues.split(", "), frozenset(city for city, row in ROWS.items() if letter in row[7]))
        for letter, (question, cues) in FLAGS.items()
    }
    for column in (1, 2, 3, 4, 5):
        for value in sorted({row[column] for row in ROWS.values()}):
            cities = frozenset(city for city, row in ROWS.items() if row[column] == value)
            found[f"Is {value} true of it?"] = ([value], cities)
    north = frozenset(ROWS) - found[FLAGS["E"][0]][1]
    found["Is it north of the equator?"] = (["north of the equator", "northern hemisphere"], north)
    for word, kinds in WEATHER.items():
        cities = frozenset(city for city, row in ROWS.items() if row[4] in kinds)
        found[f"Is it {word}?"] = ([word, f"{word} there"], cities)
    big = frozenset(city for city, row in ROWS.items() if row[6] == "4")
    found["Do more than ten million people live there?"] = (["ten million", "10 million", "megacity"], big)
    return found


def _says(column: int, row: list[str]) -> str:
    return PEOPLE[row[6]] if column == 6 else SAYS[column].format(row[column])


TRUE = _true()
ANSWERS: dict[str, dict[str, str]] = {  # question -> city -> answer
    question: {city: _says(column, row) for city, row in ROWS.items()}
    for column, (question, _) in OPEN.items()
} | {
    question: {city: "Yes." if city in TRUE[question][1] else "No." for city in ROWS}
    for question, _ in FLAGS.values()
}
CUES = Cues({question: cues for question, (cues, _) in TRUE.items()})
OPEN_CUES = Cues({question: cues.split(", ") for question, cues in OPEN.values()})
LISTED = {normal(question): question for question in ANSWERS}
WHAT = re.compile(r"\b(?:what|which|where|how|name|tell)\b")


@lru_cache(maxsize=10_000)
def _answers(text: str) -> Mapping[str, str] | None:
    if text in LISTED:
        return ANSWERS[LISTED[text]]
    if WHAT.search(text):
        asked = OPEN_CUES.find(text)
        return ANSWERS[asked[0]] if len(asked) == 1 and "country" not in text else None
    return yes_no(text, [TRUE[question][1] for question in CUES.find(text)], ROWS)


class Cities:
    """The table of the game; see `game.Table`."""

    names = tuple(ROWS)
    spoken = Names({city: row[0].split(", ") for city, row in ROWS.items()}, beside=COUNTRIES)
    questions: Mapping[str, Mapping[str, str]] = ANSWERS
    refusal, wrong = "I cannot answer that.", "No."
    prompt = (
        "You play a guessing game and know the hidden city: {name}. Answer the question about it in one "
        "short sentence. Never say the name of the city or of its country.\nQuestion: {question}\nAnswer:"
    )

    def guess(self, name: str) -> str:
        """Is it ...?"""
        return f"Is it {name}?"

    def answers(self, question: str) -> Mapping[str, str] | None:
        """Of a question with what, which, where or how: a sentence, if it asks for one thing; else yes or no.

        A country is never named, only confirmed.
        """
        return _answers(normal(question))

    def read(self, name: str, said: str) -> str | None:
        """The first line of what a model said; None, where that is empty or holds a name of the city."""
        line = " ".join(said.strip().partition("\n")[0].split())
        letters = normal(line).replace(" ", "")
        leaks = any(normal(alias).replace(" ", "") in letters for alias in ROWS[name][0].split(","))
        return None if leaks or not letters else line
