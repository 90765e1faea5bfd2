"""Simplification of JSON Schemas for models: inline references, remove titles, merge unions with null, close objects
for strict mode.
"""

from collections.abc import Callable, Mapping
from typing import Any

JsonSchema = dict[str, Any]

MAX_INLINED = 200
"""Limit of references that are replaced by their definitions in one schema; further references stay. Without a limit,
definitions that each refer twice to the next one would double the schema at every level.
"""

_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords with a value that maps names to schemas. A key `title` in such a value may be the name of a property."""
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = (
    "items",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedProperties",
)
_NOT_SHOWN = frozenset({"minLength", "maxLength", "minItems", "maxItems", "exclusiveMinimum", "x-hidden"})
"""Keywords that models do not see. A server that converts the schema to a grammar would write out each step up to a
large `maxLength`.
"""
_FOR_ANY_TYPE = frozenset({"enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "$ref"})
"""Keywords that constrain values of every type. A merged schema with one of them would refuse null."""


def plain_schema(schema: Mapping[str, Any], *, null_as_type: bool = False) -> JsonSchema:
    """Return the schema without references and titles. Recursive references and references beyond MAX_INLINED stay,
    with their definitions in `$defs`.

    `null_as_type`: `integer or null` becomes `"type": ["integer", "null"]`, so that a text dialect can convert strings
    by type.
    """
    definitions = {**schema.get("definitions", {}), **schema.get("$defs", {})}
    body = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
    inliner = _Inliner(definitions)
    plain = drop_titles(inliner.inline(body, ()))
    remaining = {name: drop_titles(inliner.remaining[name]) for name in sorted(inliner.remaining)}
    if null_as_type:
        plain = _merge_unions(plain)
        remaining = {name: _merge_unions(definition) for name, definition in remaining.items()}
    return {**plain, "$defs": remaining} if remaining else plain


def drop_titles(schema: JsonSchema) -> JsonSchema:
    """Return the schema without the keyword `title` at every level. A property of that name stays."""
    return _map({key: value for key, value in schema.items() if key != "title"}, drop_titles)


def close_schema(schema: Mapping[str, Any]) -> JsonSchema:
    """Return the schema for strict function calling: every object requires all its properties and allows no others."""
    closed = _map(dict(schema), close_schema)
    if closed.get("type") == "object" or "properties" in closed:
        closed["additionalProperties"] = False
        if closed.get("properties"):
            closed["required"] = list(closed["properties"])
    return closed


def show_schema(schema: Mapping[str, Any]) -> JsonSchema:
    """Return the schema as a model sees it: without hidden properties (`"x-hidden": true`), size limits, and defaults
    that mean "nothing" (false, and empty texts, lists and objects). A call may still contain a hidden property, and is
    checked against the whole schema. `"x-hidden": "small"` hides a property from small models only
    (orchestrator/dialects/profiles.py).
    """
    shown = {key: value for key, value in schema.items() if key not in _NOT_SHOWN}
    default = shown.get("default")
    # Not `default in (False, ...)`: 0 is a value, and equal to False.
    if default is False or default in ("", [], {}):
        del shown["default"]
    properties = shown.get("properties")
    if isinstance(properties, Mapping):
        shown["properties"] = {name: part for name, part in properties.items() if not _is_hidden(part)}
    return _map(_complete(shown), show_schema)


def complete_schema(schema: Mapping[str, Any]) -> JsonSchema:
    """Return the schema with `items` in every array. Servers of models and MCP clients refuse all tools if one schema
    has an array without `items`.
    """
    return _map(_complete(dict(schema)), complete_schema)


def _complete(schema: JsonSchema) -> JsonSchema:
    kinds = schema.get("type")
    is_array = kinds == "array" or (isinstance(kinds, list) and "array" in kinds)
    return {**schema, "items": {}} if is_array and "items" not in schema else schema


def _is_hidden(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("x-hidden") is True


class _Inliner:
    """Replaces references by their definitions. `remaining`: definitions that stay, because they are recursive or
    because MAX_INLINED was reached.
    """

    def __init__(self, definitions: Mapping[str, JsonSchema]) -> None:
        self._definitions = definitions
        self.remaining: dict[str, JsonSchema] = {}
        self._inlined = 0

    def inline(self, schema: JsonSchema, inside: tuple[str, ...]) -> JsonSchema:
        name = _definition_name(schema.get("$ref"))
        if name is None or name not in self._definitions:
            return _map(schema, lambda part: self.inline(part, inside))
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        if name in inside or name in self.remaining or self._inlined >= MAX_INLINED:
            self._keep_definition(name)
            return {"$ref": f"#/$defs/{name}", **siblings}
        self._inlined += 1
        inlined = self.inline(self._definitions[name], (*inside, name))
        if name in self.remaining:
            inlined = {"$ref": f"#/$defs/{name}"}
        return {**inlined, **_map(siblings, lambda part: self.inline(part, inside))}

    def _keep_definition(self, name: str) -> None:
        if name not in self.remaining:
            # Add the name before the definition is inlined, because the definition may refer to itself.
            self.remaining[name] = {}
            self.remaining[name] = self.inline(self._definitions[name], (name,))


def _definition_name(reference: Any) -> str | None:
    if not isinstance(reference, str):
        return None
    for start in ("#/$defs/", "#/definitions/"):
        if reference.startswith(start):
            return reference.removeprefix(start).replace("~1", "/").replace("~0", "~")
    return None


def _merge_unions(schema: JsonSchema) -> JsonSchema:
    merged = _map(schema, _merge_unions)
    branches = merged.get("anyOf")
    if (
        not isinstance(branches, list)
        or "type" in merged
        or not all(isinstance(branch, Mapping) for branch in branches)
    ):
        return merged
    kinds = [branch.get("type") for branch in branches]
    if not all(isinstance(kind, str) for kind in kinds) or len(set(kinds)) != len(kinds):
        return merged
    constrained = [branch for branch in branches if len(branch) > 1]
    if len(constrained) > 1 or any(_FOR_ANY_TYPE & branch.keys() for branch in constrained):
        return merged
    facts = {key: value for branch in constrained for key, value in branch.items() if key != "type"}
    return {**facts, **{key: value for key, value in merged.items() if key != "anyOf"}, "type": kinds}


def _map(schema: JsonSchema, change: Callable[[JsonSchema], JsonSchema]) -> JsonSchema:
    """Return a copy of the schema in which `change` was applied to its direct subschemas."""
    copy = dict(schema)
    for key in _MAPS:
        if isinstance(copy.get(key), Mapping):
            copy[key] = {name: _apply_change(part, change) for name, part in copy[key].items()}
    for key in _LISTS:
        if isinstance(copy.get(key), list):
            copy[key] = [_apply_change(part, change) for part in copy[key]]
    for key in _SINGLES:
        if key in copy:
            copy[key] = _apply_change(copy[key], change)
    return copy


def _apply_change(part: Any, change: Callable[[JsonSchema], JsonSchema]) -> Any:
    return change(dict(part)) if isinstance(part, Mapping) else part
