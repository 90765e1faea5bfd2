"""JSON Schemas made fit for a model: references inlined, titles dropped, unions with null told as a type, closed for
strict mode.
"""

from collections.abc import Callable, Mapping
from typing import Any

JsonSchema = dict[str, Any]

MAX_INLINED = 200
"""References that are replaced in one schema. Further ones stay: definitions that refer twice to the next one double at
every level.
"""

_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose value is schemas by name: what stands there as `title` may be a property."""
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
_FOR_ANY_TYPE = frozenset({"enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "$ref"})
"""Keywords that bind values of every type, so that a null beside them would not pass."""


def plain_schema(schema: Mapping[str, Any], *, tell_null_as_type: bool = False) -> JsonSchema:
    """`schema` without references and titles. A reference into itself stays, as those beyond MAX_INLINED do, with its
    definition in `$defs`.

    `tell_null_as_type`: `integer or null` becomes `"type": ["integer", "null"]`, which a text dialect's strings can be
    read by.
    """
    definitions = {**schema.get("definitions", {}), **schema.get("$defs", {})}
    body = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
    inliner = _Inliner(definitions)
    plain = drop_titles(inliner.inline(body, ()))
    kept = {name: drop_titles(inliner.kept[name]) for name in sorted(inliner.kept)}
    if tell_null_as_type:
        plain = _merge_unions(plain)
        kept = {name: _merge_unions(definition) for name, definition in kept.items()}
    return {**plain, "$defs": kept} if kept else plain


def drop_titles(schema: JsonSchema) -> JsonSchema:
    """Without the keyword `title`, at every level; a property of that name stays."""
    return _map({key: value for key, value in schema.items() if key != "title"}, drop_titles)


def close_schema(schema: Mapping[str, Any]) -> JsonSchema:
    """For strict function calling: every object allows nothing beside its properties and requires all of them."""
    closed = _map(dict(schema), close_schema)
    if closed.get("type") == "object" or "properties" in closed:
        closed["additionalProperties"] = False
        if closed.get("properties"):
            closed["required"] = list(closed["properties"])
    return closed


class _Inliner:
    """Puts definitions where they are referred to. `kept`: those that had to stay: they contain themselves, or there
    were too many.
    """

    def __init__(self, definitions: Mapping[str, JsonSchema]) -> None:
        self._definitions = definitions
        self.kept: dict[str, JsonSchema] = {}
        self._inlined = 0

    def inline(self, schema: JsonSchema, inside: tuple[str, ...]) -> JsonSchema:
        name = _definition_name(schema.get("$ref"))
        if name is None or name not in self._definitions:
            return _map(schema, lambda part: self.inline(part, inside))
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        if name in inside or name in self.kept or self._inlined >= MAX_INLINED:
            self._keep(name)
            return {"$ref": f"#/$defs/{name}", **beside}
        self._inlined += 1
        inlined = self.inline(self._definitions[name], (*inside, name))
        if name in self.kept:
            inlined = {"$ref": f"#/$defs/{name}"}
        return {**inlined, **_map(beside, lambda part: self.inline(part, inside))}

    def _keep(self, name: str) -> None:
        if name not in self.kept:
            self.kept[name] = {}
            self.kept[name] = self.inline(self._definitions[name], (name,))


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
    speaking = [branch for branch in branches if len(branch) > 1]
    if len(speaking) > 1 or any(_FOR_ANY_TYPE & branch.keys() for branch in speaking):
        return merged
    facts = {key: value for branch in speaking for key, value in branch.items() if key != "type"}
    return {**facts, **{key: value for key, value in merged.items() if key != "anyOf"}, "type": kinds}


def _map(schema: JsonSchema, change: Callable[[JsonSchema], JsonSchema]) -> JsonSchema:
    """A copy of `schema` with `change` made to the schemas right below it."""
    copy = dict(schema)
    for key in _MAPS:
        if isinstance(copy.get(key), Mapping):
            copy[key] = {name: _changed(part, change) for name, part in copy[key].items()}
    for key in _LISTS:
        if isinstance(copy.get(key), list):
            copy[key] = [_changed(part, change) for part in copy[key]]
    for key in _SINGLES:
        if key in copy:
            copy[key] = _changed(copy[key], change)
    return copy


def _changed(part: Any, change: Callable[[JsonSchema], JsonSchema]) -> Any:
    return change(dict(part)) if isinstance(part, Mapping) else part
