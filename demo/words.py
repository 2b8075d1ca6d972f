"""The vocabulary of the generated text, and how a word is drawn from a list."""

import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def words(text: str) -> tuple[str, ...]:
    """The words of `text`, each once."""
    return tuple(text.split())


GIRLS = words(
    "Mia Anna Clara Nora Ida Lena Rosa Emma Tilda Alma Vera Greta Ines Maya Olga Petra Ruth Selma Una Wanda Zoe Carla "
    "Dora Elsa Fanny Hilda Iris Jana Kira Lucia"
)
BOYS = words(
    "Tom Paul Ben Oscar Max Felix Hugo Leo Nils Karl Anton Bruno David Emil Finn Georg Henry Ivan Jakob Konrad Lukas "
    "Martin Noah Otto Peter Robin Simon Theo Victor Walter"
)

THINGS = words(
    "apples pears plums cherries lemons nuts eggs shells stones marbles stamps coins cards books pencils buttons beads "
    "candles cups plates spoons roses tulips seeds leaves feathers ribbons stickers balloons cookies muffins carrots "
    "onions potatoes pumpkins tickets keys bottles jars bricks nails screws batteries magnets kites"
)

BOXES = words("boxes bags baskets jars drawers crates bowls chests sacks trays")
SHOPS = words("market bakery library harbour station school garden mill farm workshop museum kitchen")

COLOURS = words("red blue green yellow silver golden white brown purple orange")

# What a person does for a living decides the tool in hand and the place of work: structure that a model can learn.
JOBS = {
    "baker": ("rolling pin", "bakery"),
    "gardener": ("spade", "garden"),
    "fisherman": ("net", "harbour"),
    "miller": ("sack of flour", "mill"),
    "carpenter": ("hammer", "workshop"),
    "painter": ("brush", "studio"),
    "teacher": ("piece of chalk", "school"),
    "shepherd": ("long stick", "meadow"),
    "sailor": ("rope", "boat"),
    "tailor": ("needle", "shop"),
    "farmer": ("rake", "barn"),
    "potter": ("lump of clay", "kiln house"),
    "clockmaker": ("small screwdriver", "clock shop"),
    "librarian": ("heavy book", "library"),
}

# An animal, the sound it makes and what it likes to eat.
ANIMALS = {
    "dog": ("barked", "a bone"),
    "cat": ("purred", "a bowl of milk"),
    "goat": ("bleated", "fresh grass"),
    "horse": ("neighed", "a carrot"),
    "duck": ("quacked", "a piece of bread"),
    "fox": ("yelped", "a ripe plum"),
    "owl": ("hooted", "a small fish"),
    "donkey": ("brayed", "a handful of oats"),
    "crow": ("cawed", "a shiny nut"),
    "mouse": ("squeaked", "a crumb of cheese"),
    "hedgehog": ("sniffed", "a sweet apple"),
    "rabbit": ("thumped", "a cabbage leaf"),
}

OBJECTS = words("kite lantern key hat bell basket scarf whistle map ring drum flute mirror boat ball umbrella")

# A place, the way to it, and the spot there where a lost thing turns up.
PLACES = {
    "the forest": ("along the narrow path", "under an old oak tree"),
    "the river": ("down the grassy bank", "between two flat stones"),
    "the hill": ("up the winding road", "behind a thorn bush"),
    "the beach": ("over the dunes", "half buried in the sand"),
    "the village square": ("past the church", "beside the stone well"),
    "the old castle": ("across the wooden bridge", "at the foot of the tower"),
    "the lake": ("through the reeds", "in a little rowing boat"),
    "the orchard": ("through the white gate", "in the branches of a pear tree"),
    "the railway station": ("along the high street", "on a bench by the platform"),
    "the windmill": ("through the wheat field", "next to a broken wheel"),
}

WEATHER = {
    "sunny": "The sun stood high",
    "rainy": "Rain drummed on the roofs",
    "windy": "The wind shook the trees",
    "cold": "Frost covered the windows",
    "foggy": "Fog lay over the fields",
    "warm": "The air smelled of hay",
}


def draw(rng: random.Random, items: Sequence[Item]) -> Item:
    """One of `items`, the n-th with a weight of 1 / (n + 1): like words in real text, few are common and many are rare.

    Equal weights would make the likeliest continuation a coin toss, which neither a reader nor a drafter could guess.
    """
    return rng.choices(items, [1 / (place + 1) for place in range(len(items))])[0]


def draw_names(rng: random.Random) -> tuple[str, str, str, str]:
    """Two people: (name, pronoun, other name, other pronoun), each pronoun in lower case."""
    people = rng.sample([(name, "she") for name in GIRLS] + [(name, "he") for name in BOYS], 2)
    return (*people[0], *people[1])
