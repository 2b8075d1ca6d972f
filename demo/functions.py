"""Small Python functions with a docstring, and a test whose expected values are computed by running the function."""

import random
from collections.abc import Callable

from ddtree.demo.words import draw

# (plural, singular) of what a function runs over
_NUMBERS = (
    ("numbers", "number"),
    ("values", "value"),
    ("prices", "price"),
    ("scores", "score"),
    ("ages", "age"),
    ("sizes", "size"),
    ("lengths", "length"),
    ("weights", "weight"),
    ("steps", "step"),
    ("points", "point"),
)
_WORDS = (
    ("words", "word"),
    ("names", "name"),
    ("lines", "line"),
    ("titles", "title"),
    ("keys", "key"),
    ("labels", "label"),
)
_TEXTS = ("apple", "bread", "cloud", "door", "eagle", "flame", "grass", "house", "island", "jacket", "kettle", "lemon")
_TEXTS += ("moon", "night", "ocean", "paper")


def function(rng: random.Random) -> str:
    """One function definition, followed by its test."""
    if rng.random() < 0.7:
        plural, singular = rng.choice(_NUMBERS)
        test, adjective, suffix = _number_condition(rng, singular)
        samples = [[rng.randint(1, 30) for _ in range(rng.randint(3, 5))] for _ in range(2)]
    else:
        plural, singular = rng.choice(_WORDS)
        test, adjective, suffix = _word_condition(rng, singular)
        samples = [rng.sample(_TEXTS, rng.randint(2, 4)) for _ in range(2)]
    shape = draw(rng, _NUMBER_SHAPES if isinstance(samples[0][0], int) else _WORD_SHAPES)
    name, source = shape(plural, singular, test, adjective, suffix)
    namespace: dict[str, Callable] = {}
    exec(source, namespace)
    checks = [f"    assert {name}({sample!r}) == {namespace[name](sample)!r}".replace("'", '"') for sample in samples]
    return source + "\n\n" + "\n".join([f"def test_{name}():", *checks]) + "\n"


def _number_condition(rng: random.Random, item: str) -> tuple[str, str, str]:
    limit, divisor = rng.choice((5, 10, 15, 20)), rng.randint(3, 9)
    return draw(
        rng,
        (
            (f"{item} % 2 == 0", "even", "that are even"),
            (f"{item} > {limit}", f"large_{limit}", f"greater than {limit}"),
            (f"{item} % 2 == 1", "odd", "that are odd"),
            (f"{item} < {limit}", f"small_{limit}", f"less than {limit}"),
            (f"{item} % {divisor} == 0", f"multiple_{divisor}", f"that are multiples of {divisor}"),
        ),
    )


def _word_condition(rng: random.Random, item: str) -> tuple[str, str, str]:
    size, letter = rng.randint(3, 6), rng.choice("abcdeghklmnoprst")
    return draw(
        rng,
        (
            (f"len({item}) > {size}", f"longer_{size}", f"longer than {size} letters"),
            (f'{item}.startswith("{letter}")', f"starting_{letter}", f"that start with {letter}"),
            (f'"{letter}" in {item}', f"having_{letter}", f"that contain {letter}"),
            (f"len({item}) == {size}", f"of_{size}", f"of {size} letters"),
        ),
    )


def _count(plural, singular, test, adjective, suffix):
    name = f"count_{adjective}_{plural}"
    return name, (
        f"def {name}({plural}):\n"
        f'    """Return how many {plural} there are {suffix}."""\n'
        f"    count = 0\n"
        f"    for {singular} in {plural}:\n"
        f"        if {test}:\n"
        f"            count += 1\n"
        f"    return count\n"
    )


def _select(plural, singular, test, adjective, suffix):
    name = f"select_{adjective}_{plural}"
    return name, (
        f"def {name}({plural}):\n"
        f'    """Return a list of the {plural} {suffix}."""\n'
        f"    result = []\n"
        f"    for {singular} in {plural}:\n"
        f"        if {test}:\n"
        f"            result.append({singular})\n"
        f"    return result\n"
    )


def _total(plural, singular, test, adjective, suffix):
    name = f"total_{adjective}_{plural}"
    return name, (
        f"def {name}({plural}):\n"
        f'    """Return the sum of the {plural} {suffix}."""\n'
        f"    total = 0\n"
        f"    for {singular} in {plural}:\n"
        f"        if {test}:\n"
        f"            total += {singular}\n"
        f"    return total\n"
    )


def _first(plural, singular, test, adjective, suffix):
    name = f"first_{adjective}_{singular}"
    return name, (
        f"def {name}({plural}):\n"
        f'    """Return the first of the {plural} {suffix}, or None."""\n'
        f"    for {singular} in {plural}:\n"
        f"        if {test}:\n"
        f"            return {singular}\n"
        f"    return None\n"
    )


def _largest(plural, singular, test, adjective, suffix):
    name = f"largest_{adjective}_{singular}"
    return name, (
        f"def {name}({plural}):\n"
        f'    """Return the largest of the {plural} {suffix}, or None."""\n'
        f"    best = None\n"
        f"    for {singular} in {plural}:\n"
        f"        if {test} and (best is None or {singular} > best):\n"
        f"            best = {singular}\n"
        f"    return best\n"
    )


def _every(plural, singular, test, adjective, suffix):
    name = f"all_{adjective}_{plural}"
    return name, (
        f"def {name}({plural}):\n"
        f'    """Return True if there are only {plural} {suffix}."""\n'
        f"    for {singular} in {plural}:\n"
        f"        if not ({test}):\n"
        f"            return False\n"
        f"    return True\n"
    )


def _positions(plural, singular, test, adjective, suffix):
    name = f"find_{adjective}_{plural}"
    return name, (
        f"def {name}({plural}):\n"
        f'    """Return the positions of the {plural} {suffix}."""\n'
        f"    positions = []\n"
        f"    for index, {singular} in enumerate({plural}):\n"
        f"        if {test}:\n"
        f"            positions.append(index)\n"
        f"    return positions\n"
    )


_NUMBER_SHAPES = (_count, _total, _select, _first, _largest, _positions, _every)
_WORD_SHAPES = (_select, _count, _first, _positions, _every)
