"""Short stories: somebody loses or finds something, and an animal helps.

A story draws its people, animal, thing and place in the opening. What comes after mostly follows from them (a
fisherman works at the harbour with a net; what is lost in the forest turns up under the oak), with several wordings
for each turn.
"""

import random

from ddtree.demo.words import ANIMALS, COLOURS, JOBS, OBJECTS, PLACES, WEATHER, draw, draw_names


def story(rng: random.Random) -> str:
    """One story of three paragraphs with a title."""
    name, pronoun, friend, _ = draw_names(rng)
    job = rng.choice(tuple(JOBS))
    tool, work = JOBS[job]
    animal = rng.choice(tuple(ANIMALS))
    sound, food = ANIMALS[animal]
    an_animal = f"{'an' if animal[0] in 'aeiou' else 'a'} {animal}"
    place = rng.choice(tuple(PLACES))
    way, spot = PLACES[place]
    weather = rng.choice(tuple(WEATHER))
    facts = {
        "name": name,
        "he": pronoun,
        "He": pronoun.capitalize(),
        "his": {"he": "his", "she": "her"}[pronoun],
        "friend": friend,
        "job": job,
        "tool": tool,
        "work": work,
        "animal": animal,
        "an_animal": an_animal,
        "An_animal": an_animal.capitalize(),
        "sound": sound,
        "food": food,
        "place": place,
        "way": way,
        "spot": spot,
        "weather": weather,
        "sky": WEATHER[weather],
        "thing": f"{rng.choice(COLOURS)} {rng.choice(OBJECTS)}",
    }
    paragraphs = [" ".join(draw(rng, turn) for turn in part) for part in rng.choice(_PLOTS)]
    title = draw(rng, ("{name} and the {thing}", "The {thing}", "The {job} and the {animal}"))
    return "\n\n".join([title, *paragraphs]).format(**facts) + "\n"


_WHO = (
    "{name} was a {job} who lived near {place}.",
    "Near {place} there lived a {job} named {name}.",
    "Once there was a {job} named {name}, who lived near {place}.",
    "Everybody near {place} knew {name}, the {job}.",
)
_OWNS = (
    "Of all things {he} loved {his} {thing} most.",
    "{He} had a {thing}, a present from {his} friend {friend}.",
    "Every day {he} took {his} {tool} and {his} {thing} to the {work}.",
)
_LOSS = (
    "One {weather} morning the {thing} was gone.",
    "On a {weather} day {name} came home from the {work} without the {thing}.",
    "But one {weather} evening {he} could not find the {thing}.",
)
_WORRY = (
    "{name} looked in the {work}, but the {thing} was not there.",
    "{He} put down {his} {tool} and searched the whole {work}.",
    "{He} asked {friend}, but {friend} had not seen it.",
)
_MEETING = (
    "{sky} when {name} met {an_animal}.",
    "{sky}, and {an_animal} came {way}.",
    "Then a little {animal} came out and {sound}.",
)
_PLEA = (
    '"Have you seen my {thing}?" asked {name}.',
    '"Please help me to find my {thing}," said {name}.',
    '"I am looking for my {thing}," said {name} to the {animal}.',
)
_REPLY = (
    'The {animal} {sound} and said, "Give me {food}, and I will show you."',
    'The {animal} {sound}. "For {food} I will take you to {place}."',
    '"I have seen it near {place}," the {animal} said. "Come with me."',
)
_GIFT = (
    "So {name} gave the {animal} {food}, and they went {way} to {place}.",
    "{name} ran home and fetched {food}, and then they walked {way} to {place}.",
    "{name} followed the {animal} {way}, all the way to {place}.",
)
_FOUND = (
    "There, {spot}, lay the {thing}.",
    "And {spot} they found the {thing}.",
    "The {animal} stopped, and there was the {thing}, {spot}.",
)
_THANKS = (
    '"Thank you," said {name}, and the {animal} {sound} happily.',
    "{name} laughed, and the {animal} {sound}.",
    "{name} was so glad that {he} gave the {animal} {food} once more.",
)
_HOME = (
    "In the evening {name} told {friend} about the {animal}.",
    "When {friend} heard of it, {friend} laughed with joy.",
    "That night {name} went back to the {work} and sang.",
)
_END = (
    "From that day on the {job} and the {animal} were friends.",
    "And {name} never lost the {thing} again.",
    "Since then the {animal} gets {food} every morning.",
)
_FIND = (
    "One {weather} morning {name} took {his} {tool} and went {way}.",
    "On a {weather} day {he} walked {way} to {place}.",
    "{sky} when {name} went {way} with {his} {tool}.",
)
_SURPRISE = (
    "There, {spot}, {he} saw a {thing}.",
    "Suddenly {he} found a {thing} {spot}.",
    "And {spot} lay a {thing} that nobody had ever seen.",
)
_WONDER = (
    '"Whose {thing} is this?" asked {name}.',
    '"Somebody must miss this {thing}," said {name}.',
    "{name} put down {his} {tool} and looked at the {thing}.",
)
_OWNER = (
    '{An_animal} {sound}. "The {thing} belongs to {friend}," it said.',
    'Then {an_animal} came and {sound}. "{friend} has lost it," the {animal} said.',
    '{An_animal} sat nearby and {sound}. "Ask {friend}," it said.',
)
_RETURN = (
    "So {name} took the {thing} to {friend}, who thanked the {job}.",
    "{name} gave the {thing} back, and the {animal} danced.",
    "{name} carried the {thing} home and showed it to {friend}.",
)
_REWARD = (
    "{friend} gave the {animal} {food} and invited {name} to dinner.",
    "As a reward {name} got a new {tool}.",
    "They ate together, and the {animal} got {food}.",
)

_LOST = ((_WHO, _OWNS, _LOSS, _WORRY), (_MEETING, _PLEA, _REPLY, _GIFT), (_FOUND, _THANKS, _HOME, _END))
_FINDING = ((_WHO, _FIND, _SURPRISE), (_WONDER, _OWNER, _RETURN), (_REWARD, _HOME, _END))
_PLOTS = (_LOST, _LOST, _FINDING)
