"""Word problems with worked solutions.

The statement draws names, things and numbers; the solution follows from it line by line, as it would in a school book.
"""

import random

from ddtree.demo.words import BOXES, SHOPS, THINGS, draw, draw_names


def problem(rng: random.Random) -> str:
    """One problem of two or three steps, its solution and a check."""
    name, pronoun, friend, _ = draw_names(rng)
    thing = rng.choice(THINGS)
    have = rng.randint(5, 30)
    statement = [draw(rng, _OPENINGS).format(name=name, have=have, thing=thing, shop=draw(rng, SHOPS))]
    solution = [f"{name} starts with {have} {thing}."]
    check = []
    for step in rng.sample(_STEPS, rng.choice((1, 2, 2))):
        before = have
        told, explained, have, undone = step(rng, name, pronoun, friend, thing, have)
        statement.append(told)
        solution.append(explained)
        check.insert(0, (undone, before))
    last = rng.choice((_share, _pack, _price, None))
    if last is None:
        question = draw(rng, _QUESTIONS).format(name=name, pronoun=pronoun, thing=thing)
        answer = f"{name} has {have} {thing}"
    else:
        told, question, explained, answer = last(rng, name, pronoun, thing, have)
        statement.append(told)
        solution.append(explained)
    lines = [f"Problem: {' '.join(statement)} {question}", "Solution:"]
    lines += [f"Step {number}. {line}" for number, line in enumerate(solution, 1)]
    lines += [f"Answer: {answer}."]
    lines += ["Check: " + ", ".join(f"{undone} = {before}" for undone, before in check) + "."]
    return "\n".join(lines) + "\n"


_OPENINGS = (
    "{name} has {have} {thing}.",
    "{name} finds {have} {thing} at the {shop}.",
    "{name} buys {have} {thing} at the {shop}.",
    "There are {have} {thing} on the table of {name}.",
    "{name} collects {thing} and owns {have} of them.",
)
_QUESTIONS = (
    "How many {thing} does {name} have now?",
    "How many {thing} are left for {name}?",
    "Count the {thing} that {name} has in the end.",
)


def _gain(rng, name, pronoun, friend, thing, have):
    more = rng.randint(2, 20)
    told = draw(rng, ("{friend} gives {name} {more} more.", "Then {name} gets {more} more from {friend}."))
    return (
        told.format(name=name, friend=friend, more=more),
        f"{friend} adds {more} {thing}, so {pronoun} has {have} + {more} = {have + more} {thing}.",
        have + more,
        f"{have + more} - {more}",
    )


def _lose(rng, name, pronoun, friend, thing, have):
    less = rng.randint(2, max(2, have - 2))
    told = draw(rng, ("{name} gives {less} of them to {friend}.", "On the way home {name} loses {less} of them."))
    return (
        told.format(name=name, friend=friend, less=less),
        f"Then {less} {thing} are gone, so {pronoun} has {have} - {less} = {have - less} {thing}.",
        have - less,
        f"{have - less} + {less}",
    )


def _double(rng, name, pronoun, friend, thing, have):
    return (
        f"The next day {name} doubles the number of {thing}.",
        f"Twice as many {thing} are 2 * {have} = {2 * have} {thing}.",
        2 * have,
        f"{2 * have} / 2",
    )


_STEPS = (_gain, _gain, _lose, _lose, _double)


def _share(rng, name, pronoun, thing, have):
    children = rng.randint(2, 6)
    each, rest = divmod(have, children)
    return (
        f"{name} shares the {thing} fairly among {children} children.",
        f"How many {thing} does each child get?",
        f"Each of the {children} children gets {have} / {children} = {each} {thing}, and {rest} are left over.",
        f"Each child gets {each} {thing}",
    )


def _pack(rng, name, pronoun, thing, have):
    box, size = draw(rng, BOXES), rng.randint(2, 6)
    full, rest = divmod(have, size)
    return (
        f"{name} packs the {thing} into {box}, {size} in each.",
        f"How many {box} are full?",
        f"With {size} {thing} in each, {have} / {size} = {full} {box} are full, and {rest} {thing} are left over.",
        f"{full} {box} are full",
    )


def _price(rng, name, pronoun, thing, have):
    price = rng.choice((2, 3, 5, 10))
    return (
        f"{name} sells all the {thing} for {price} coins each.",
        f"How many coins does {name} get?",
        f"The {have} {thing} bring {have} * {price} = {have * price} coins.",
        f"{name} gets {have * price} coins",
    )
