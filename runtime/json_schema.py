"""Which JSON schemas xgrammar holds a text to.

It takes any schema, and leaves out in silence what it cannot express, so that the text would break the schema. Such a
schema is refused here. What is left out was found by trying every keyword of JSON Schema 2020-12 alone and beside
others with xgrammar 0.2.9 (tests/runtime/test_grammar.py). What xgrammar makes narrower is let through: properties in
their order, no others unless ``additionalProperties`` allows them, a ``pattern`` that matches the whole string.
``oneOf`` is taken as ``anyOf``, and ``format`` as far as xgrammar knows it.
"""

import json
from collections.abc import Iterator
from typing import Any

from ddtree.runtime.errors import RequestError

_FINEST = 1e-5  # xgrammar writes numbers with a bound to 6 decimals
_DEEPEST = 128  # brackets within brackets; at twice that xgrammar takes seconds, at four times minutes

_RANGE = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_KEYWORDS: dict[str, set[str]] = {  # by type
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": _RANGE,
    "number": _RANGE,
    "object": {
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties"),
    },
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "boolean": set(),
    "null": set(),
}
_TELLING = {  # the type, where none is given
    "object": {"properties", "additionalProperties", "unevaluatedProperties"},
    "array": {"items", "prefixItems", "unevaluatedItems"},
}
_ALONE = {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"}  # beside one of them nothing else counts
_NEVER = {
    *("contains", "minContains", "maxContains", "uniqueItems", "multipleOf", "not", "if", "then", "else"),
    *("dependencies", "dependentRequired", "dependentSchemas", "$dynamicRef", "additionalItems"),
    *("unevaluatedItems", "unevaluatedProperties"),
}
_ALL = set[str]().union(*_KEYWORDS.values(), _ALONE, _NEVER)  # any other keyword describes, and binds nothing
_FIRST_ONLY = [  # of the sets that are there, only the first counts
    [{"pattern"}, {"format"}, {"minLength", "maxLength"}],
    [{"properties"}, {"patternProperties"}, {"propertyNames"}],
    [{"patternProperties"}, {"additionalProperties"}, {"minProperties", "maxProperties"}],
]


def json_schema_text(given: Any) -> str:
    """A JSON schema, given as text, dict or Pydantic class, as text.

    Raises:
        RequestError: it is no JSON, or it holds a keyword that xgrammar would leave out.
    """
    try:
        schema = _schema_of(given) if hasattr(given, "model_json_schema") else given
        schema = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(schema, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"guided_decoding.json is not a JSON schema: {error}") from None
    if _depth(text) > _DEEPEST:
        raise RequestError(f"guided_decoding.json has more than {_DEEPEST} brackets in brackets (make it flatter)")
    try:
        parts = list(_parts(schema, "#"))
        left_out = [(place, keyword) for place, part in parts for keyword in sorted(_left_out(part) | _empty(part))]
    except TypeError as error:  # a keyword's value is of another type than JSON Schema says
        raise RequestError(f"guided_decoding.json is not a JSON schema: {error}") from None
    for place, keyword in left_out:
        raise RequestError(f"guided_decoding.json: {keyword!r} at {place} is not supported there (leave it out)")
    return text


def _schema_of(model: Any) -> Any:
    try:
        return model.model_json_schema()
    except Exception as error:  # a class of the caller's
        raise ValueError(f"{type(error).__name__}: {' '.join(str(error).split())}") from None


def _empty(schema: dict[str, Any]) -> set[str]:
    """The keywords of a schema that leave no value, or finer numbers than xgrammar writes, or point where it does not
    look."""
    found = {name for name in ("anyOf", "oneOf", "allOf", "enum", "type") if schema.get(name) == []}
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith(("#/$defs/", "#/definitions/"))):
        found.add("$ref")
    bounds = {name: schema[name] for name in _RANGE & schema.keys()}
    low = [bounds[name] for name in ("minimum", "exclusiveMinimum") if name in bounds]
    high = [bounds[name] for name in ("maximum", "exclusiveMaximum") if name in bounds]
    narrow = low and high and schema.get("type") != "integer" and min(high) - max(low) < _FINEST
    return found | {name for name, bound in bounds.items() if narrow or round(bound, 6) != bound}


def _left_out(schema: dict[str, Any]) -> set[str]:
    """The keywords of a schema that xgrammar does not hold to."""
    used = schema.keys() & _ALL
    alone = used & _ALONE
    types = schema.get("type") or [name for name, keywords in _TELLING.items() if schema.keys() & keywords]
    types = [types] if isinstance(types, str) else types
    kept = set(sorted(alone)[:1]) if alone else set[str]().union(*(_KEYWORDS.get(name, set()) for name in types))
    for sets in _FIRST_ONLY:
        kept -= set[str]().union(*[keywords for keywords in sets if keywords & used][1:])
    # No property and no item that the schema does not name, which is how xgrammar understands every schema.
    kept |= {name for name in ("unevaluatedItems", "unevaluatedProperties") if schema.get(name) is False}
    if len(schema.get("allOf", [])) > 1:
        kept.discard("allOf")
    if not set(schema.get("required", [])) <= set(schema.get("properties", {})):
        kept.discard("required")
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if "type" in schema and alone and not (values and all(_is(value, types) for value in values)):
        kept -= alone
    return used - kept


def _is(value: Any, types: list[str]) -> bool:
    """Whether a JSON value is of one of the types."""
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int):
        return "integer" in types or "number" in types
    of = {"string": str, "number": float, "object": dict, "array": list, "null": type(None)}
    return any(isinstance(value, of[name]) for name in types if name in of)


def _parts(schema: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and all schemas in it, each with its place."""
    if not isinstance(schema, dict):
        return  # true, false, or what xgrammar refuses
    yield place, schema
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            for name, part in value.items():
                yield from _parts(part, f"{place}/{keyword}/{name}")
        elif keyword in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            for at, part in enumerate(value):
                yield from _parts(part, f"{place}/{keyword}/{at}")
        elif keyword in ("items", "additionalProperties", "propertyNames"):
            yield from _parts(value, f"{place}/{keyword}")


def _depth(text: str) -> int:
    """How deep brackets stand in brackets, those in strings counted too."""
    depth = deepest = 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        deepest = max(deepest, depth)
    return deepest
