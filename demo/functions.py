"""Small Python functions with a docstring, and a test whose expected values are computed by running the function."""

import random
from collections.abc import Callable

from ddtree.demo.words import draw, words

# What a function runs over, in the singular; the plural adds an s.
_NUMBERS = words(
    "number value price score age size length weight step point speed level mark rate grade height width depth day "
    "hour minute mile coin card seat floor page ticket vote goal amount distance angle count bill salary order share "
    "limit delay"
)
_STRINGS = words(
    "word name line title key label letter token tag path note message street river fruit animal colour verse town "
    "tool flower"
)
_TEXTS = words("apple bread cloud door eagle flame grass house island jacket kettle lemon moon night ocean paper")


def function(rng: random.Random) -> str:
    """One function definition, followed by its test."""
    if rng.random() < 0.7:
        singular, shapes = rng.choice(_NUMBERS), _NUMBER_SHAPES
        condition = _number_condition(rng, singular)
        samples = [[rng.randint(1, 60) for _ in range(rng.randint(3, 5))] for _ in range(2)]
    else:
        singular, shapes = rng.choice(_STRINGS), _STRING_SHAPES
        condition = _string_condition(rng, singular)
        samples = [rng.sample(_TEXTS, rng.randint(2, 4)) for _ in range(2)]
    name, source = draw(rng, shapes)(rng, f"{singular}s", singular, *condition)
    namespace: dict[str, Callable] = {}
    exec(source, namespace)
    checks = [f"    assert {name}({sample!r}) == {namespace[name](sample)!r}".replace("'", '"') for sample in samples]
    return source + "\n\n" + "\n".join([f"def test_{name}():", *checks]) + "\n"


def _number_condition(rng: random.Random, item: str) -> tuple[str, str, str]:
    """(test, name of what passes it, the same in words)"""
    low, high = rng.randint(2, 29), rng.randint(30, 59)
    divisor, rest = rng.randint(3, 9), rng.randint(0, 2)
    return rng.choice(
        (
            (f"{item} > {low}", f"above_{low}", f"greater than {low}"),
            (f"{item} < {high}", f"below_{high}", f"less than {high}"),
            (f"{low} < {item} < {high}", f"from_{low}_to_{high}", f"between {low} and {high}"),
            (
                f"{item} % {divisor} == {rest} and {item} > {low}",
                f"rest_{rest}_by_{divisor}_above_{low}",
                f"greater than {low} with rest {rest} by {divisor}",
            ),
            (f"{item} % 2 == 0 and {item} > {low}", f"even_above_{low}", f"that are even and greater than {low}"),
            (f"{item} % 2 == 1 and {item} < {high}", f"odd_below_{high}", f"that are odd and less than {high}"),
            (f"{item} != {low} and {item} < {high}", f"not_{low}", f"less than {high}, but not {low}"),
        ),
    )


def _string_condition(rng: random.Random, item: str) -> tuple[str, str, str]:
    """(test, name of what passes it, the same in words)"""
    size, (letter, other) = rng.randint(3, 6), rng.sample("abcdeghklmnoprst", 2)
    return rng.choice(
        (
            (
                f'"{letter}" in {item} and "{other}" in {item}',
                f"having_{letter}_and_{other}",
                f"that contain {letter} and {other}",
            ),
            (
                f'"{letter}" in {item} and len({item}) > {size}',
                f"having_{letter}_longer_{size}",
                f"that contain {letter} and are longer than {size} letters",
            ),
            (
                f'{item}.startswith("{letter}") or {item}.endswith("{other}")',
                f"starting_{letter}_or_ending_{other}",
                f"that start with {letter} or end with {other}",
            ),
        ),
    )


def _count(rng, plural, singular, test, adjective, suffix):
    name, count = f"count_{adjective}_{plural}", draw(rng, ("count", "found", "hits"))
    return name, (
        f"def {name}({plural}):\n"
        f'    """Return how many {plural} there are {suffix}."""\n'
        f"    {count} = 0\n"
        f"    for {singular} in {plural}:\n"
        f"        if {test}:\n"
        f"            {count} += 1\n"
        f"    return {count}\n"
    )


def _select(rng, plural, singular, test, adjective, suffix):
    name, result = f"select_{adjective}_{plural}", draw(rng, ("result", "selected", "kept"))
    return name, (
        f"def {name}({plural}):\n"
        f'    """Return a list of the {plural} {suffix}."""\n'
        f"    {result} = []\n"
        f"    for {singular} in {plural}:\n"
        f"        if {test}:\n"
        f"            {result}.append({singular})\n"
        f"    return {result}\n"
    )


def _total(rng, plural, singular, test, adjective, suffix):
    name, total = f"total_{adjective}_{plural}", draw(rng, ("total", "result", "amount_so_far"))
    return name, (
        f"def {name}({plural}):\n"
        f'    """Return the sum of the {plural} {suffix}."""\n'
        f"    {total} = 0\n"
        f"    for {singular} in {plural}:\n"
        f"        if {test}:\n"
        f"            {total} += {singular}\n"
        f"    return {total}\n"
    )


def _first(rng, plural, singular, test, adjective, suffix):
    name, otherwise = f"first_{adjective}_{singular}", draw(rng, ("None", "-1", "False"))
    return name, (
        f"def {name}({plural}):\n"
        f'    """Return the first of the {plural} {suffix}, or {otherwise}."""\n'
        f"    for {singular} in {plural}:\n"
        f"        if {test}:\n"
        f"            return {singular}\n"
        f"    return {otherwise}\n"
    )


def _largest(rng, plural, singular, test, adjective, suffix):
    name, best = f"largest_{adjective}_{singular}", draw(rng, ("best", "largest", "result"))
    return name, (
        f"def {name}({plural}):\n"
        f'    """Return the largest of the {plural} {suffix}, or None."""\n'
        f"    {best} = None\n"
        f"    for {singular} in {plural}:\n"
        f"        if ({test}) and ({best} is None or {singular} > {best}):\n"
        f"            {best} = {singular}\n"
        f"    return {best}\n"
    )


def _every(rng, plural, singular, test, adjective, suffix):
    name = f"all_{adjective}_{plural}"
    return name, (
        f"def {name}({plural}):\n"
        f'    """Return True if there are only {plural} {suffix}."""\n'
        f"    for {singular} in {plural}:\n"
        f"        if not ({test}):\n"
        f"            return False\n"
        f"    return True\n"
    )


def _positions(rng, plural, singular, test, adjective, suffix):
    name, positions = f"find_{adjective}_{plural}", draw(rng, ("positions", "places", "result"))
    return name, (
        f"def {name}({plural}):\n"
        f'    """Return the positions of the {plural} {suffix}."""\n'
        f"    {positions} = []\n"
        f"    for index, {singular} in enumerate({plural}):\n"
        f"        if {test}:\n"
        f"            {positions}.append(index)\n"
        f"    return {positions}\n"
    )


_NUMBER_SHAPES = (_count, _total, _select, _first, _largest, _positions, _every)
_STRING_SHAPES = (_select, _count, _first, _positions, _every)
