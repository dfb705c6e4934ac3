"""The values that a field takes, in words, from its JSON schema."""

from typing import NamedTuple

from pydantic import BaseModel

from tasks.glue.own import Definition
from tasks.glue.pairs import PairSet

KINDS = {"string": "text", "boolean": "true or false"}  # other types keep their names in JSON Schema


class InList(NamedTuple):
    """A model that a list in a recipe holds, and its name in sentences."""

    model: type[BaseModel]
    words: str


IN_LISTS = {
    "Definition": InList(Definition, "definition"),
    "PairSet": InList(PairSet, 'object such as {"data": "FILE"}'),
}


def describe_values(schema: dict) -> str:
    """The values that a field takes, in words, from its JSON schema: a type with its range, or choices."""
    several = schema.get("anyOf") or schema.get("oneOf")
    if several:
        return ", or ".join(map(describe_values, several))
    if "$ref" in schema:
        return in_list(schema["$ref"]).words
    if "items" in schema:
        each = describe_values(schema["items"])
        return f"list, each {each}" if each.startswith("one of") else f"list of {each}"
    values = schema.get("additionalProperties")
    if isinstance(values, dict):
        return f"object with values: {describe_values(values)}"
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices == [True, False]:
        return "true or false"
    if choices:
        return f"one of {', '.join(map(str, choices))}"
    if "examples" in schema:
        return f"text, such as {', '.join(schema['examples'])}"
    kind = schema.get("type", "any value")
    return f"{KINDS.get(kind, kind)} {describe_range(schema)}".strip()


def describe_range(schema: dict) -> str:
    """The range of a number, in words; empty if there is none."""
    if "minimum" in schema and "maximum" in schema:
        return f"{schema['minimum']:,} to {schema['maximum']:,}"
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    return ", ".join(f"{word} {schema[name]:,}" for name, word in words.items() if name in schema)


def in_list(reference: str) -> InList:
    """The model to which a JSON schema refers by a name that has the name of its class in it."""
    return next(found for name, found in IN_LISTS.items() if name in reference)


def model_in_list(schema: dict) -> type[BaseModel] | None:
    """The model that an item of a list with this JSON schema may be; None if there is none."""
    for inner in (schema, *schema.get("anyOf", []), *schema.get("oneOf", [])):
        if "$ref" in inner:
            return in_list(inner["$ref"]).model
    return None


def choices_in(schema: dict) -> list:
    """All values that a field takes by name."""
    found = list(schema.get("enum", []))
    for inner in (*schema.get("anyOf", []), *schema.get("oneOf", [])):
        found += choices_in(inner)
    return found
