"""Conversion of a schema in any draft of JSON Schema or in the dialect of OpenAPI to a plain schema of draft 2020-12.

The result has no references, no regular expressions and no unknown keywords, and its top level is an object. A keyword
that has no counterpart is dropped: the program that runs the tool checks its arguments itself. What is too large or too
deep is cut to `{}`, which accepts every value.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from jsonschema import Draft202012Validator

from toolcrew.contract.json_limits import count_values, is_deeper

Json = dict[str, Any]

MAX_STEPS = 2000
"""Limit of the schemas and values in the result of one conversion."""
MAX_CHARS = 64 * 1024
MAX_REFERENCE_CHARS = 1000
_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_OTHER_TYPES = {name: "integer" for name in ("int", "int32", "int64", "long")}
_OTHER_TYPES |= {name: "number" for name in ("float", "double", "decimal")}
_OTHER_TYPES |= {"str": "string", "text": "string", "bool": "boolean", "dict": "object", "map": "object"}
_OTHER_TYPES |= {"list": "array"}
_COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_FLAGS = ("uniqueItems", "deprecated", "readOnly", "writeOnly")
_TEXTS = ("format", "contentEncoding", "contentMediaType")
_LISTS = ("allOf", "anyOf", "oneOf")
_SINGLE = ("contains", "propertyNames", "not", "if", "then", "else")
_ALTERNATIVES = ("anyOf", "oneOf")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class TooLarge(Exception):
    """Error: the result exceeds MAX_STEPS or MAX_CHARS."""


@dataclass(frozen=True)
class Cut:
    """How much of a schema is kept. `references`: how many references inside each other are followed. `repeats`: how
    often the same reference may occur among them. `depth`: nesting of the result as JSON. `text_chars`: length of a
    description. `has_values`: whether defaults, examples and lists of values are kept.
    """

    depth: int
    references: int = 8
    repeats: int = 2
    text_chars: int | None = None
    has_values: bool = True


@dataclass
class Converter:
    """Converts one schema with one Cut. `clean` replaces characters in texts for people."""

    root: Any
    cut: Cut
    clean: Callable[[str], str]
    _steps: int = 0
    _chars: int = 0
    _anchors: dict[str, Any] | None = field(default=None)

    def convert(self) -> Json:
        """Return the schema of the parameters. Raises TooLarge."""
        schema = self._schema(self.root, 0, ())
        return _as_object(schema if isinstance(schema, dict) else {})

    def _count(self, steps: int, chars: int = 0) -> None:
        self._steps += steps
        self._chars += chars
        if self._steps > MAX_STEPS or self._chars > MAX_CHARS:
            raise TooLarge

    def _schema(self, schema: Any, depth: int, above: tuple[str, ...]) -> Any:
        """Return the converted schema at `depth` levels of JSON, inside the references `above`."""
        self._count(1)
        if schema is False:
            return {"not": {}}
        if not isinstance(schema, dict) or depth >= self.cut.depth:
            return {}
        converted = self._keywords(schema, depth, above)
        for key in _REFERENCES:
            if isinstance(schema.get(key), str):
                converted = _merge(self._referred(schema[key], depth, above), converted)
                break
        is_nullable = schema.get("nullable") is True or schema.get("x-nullable") is True
        return _admit_null(converted) if is_nullable else converted

    def _referred(self, reference: str, depth: int, above: tuple[str, ...]) -> Json:
        if len(above) >= self.cut.references or above.count(reference) > self.cut.repeats:
            return {}
        target = self._schema(self._find(reference), depth, (*above, reference))
        return target if isinstance(target, dict) else {}

    def _find(self, reference: str) -> Any:
        """Return the target of a reference inside the schema; None if there is none or the reference is too long."""
        # Counted, because a schema may repeat a long reference for each of its properties.
        self._count(1 + reference.count("/"))
        if len(reference) > MAX_REFERENCE_CHARS:
            return None
        base, _, fragment = reference.partition("#")
        own = (self.root.get("$id"), self.root.get("id")) if isinstance(self.root, dict) else ()
        if base and base not in own:
            return self._find_anchor(base)
        if fragment and not fragment.startswith("/"):
            return self._find_anchor(fragment)
        part = self.root
        for step in unquote(fragment).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(part, list):
                part = part[int(name)] if name.isdecimal() and len(name) < 6 and int(name) < len(part) else None
            else:
                part = part.get(name) if isinstance(part, dict) else None
        return part

    def _find_anchor(self, name: str) -> Any:
        if self._anchors is None:
            self._anchors = {}
            pending = [self.root]
            while pending:
                part = pending.pop()
                if isinstance(part, dict):
                    for key in ("$anchor", "$dynamicAnchor", "$id", "id"):
                        if isinstance(part.get(key), str):
                            self._anchors.setdefault(part[key].removeprefix("#"), part)
                    pending += part.values()
                elif isinstance(part, list):
                    pending += part
        return self._anchors.get(name)

    # --- Keywords --------------------------------------------------------------------------------------------------

    def _keywords(self, schema: Json, depth: int, above: tuple[str, ...]) -> Json:
        converted: Json = {}
        schema = _move_enum(schema)
        self._add_types(converted, schema, depth, above)
        self._add_texts(converted, schema)
        self._add_values(converted, schema, depth)
        _add_bounds(converted, schema)
        self._add_properties(converted, schema, depth, above)
        self._add_items(converted, schema, depth, above)
        for key in _SINGLE:
            if isinstance(schema.get(key), dict | bool):
                converted[key] = self._schema(schema[key], depth + 1, above)
        for key, forms in (*((key, schema.get(key)) for key in _LISTS), ("allOf", schema.get("extends"))):
            forms = [forms] if key == "allOf" and isinstance(forms, dict) else forms
            # Generators write `oneOf` for forms that overlap, such as integer and number. The server decides.
            key = "anyOf" if key == "oneOf" and "anyOf" not in converted else key
            if isinstance(forms, list) and forms:
                converted[key] = [self._schema(form, depth + 2, above) for form in forms]
        return converted

    def _add_types(self, converted: Json, schema: Json, depth: int, above: tuple[str, ...]) -> None:
        given = schema.get("type")
        types = given if isinstance(given, list) else [given]
        self._count(len(types))
        forms = [self._schema(kind, depth + 2, above) for kind in types if isinstance(kind, dict)]
        names = [_OTHER_TYPES.get(kind.lower(), kind.lower()) for kind in types if isinstance(kind, str)]
        valid = list(dict.fromkeys(name for name in names if name in _TYPES))
        if len(valid) < len(set(names)):
            # "any", or a type that JSON Schema does not know: the schema admits more than the other types.
            return
        if forms:
            converted["anyOf"] = [*forms, *({"type": name} for name in valid)]
        elif valid:
            converted["type"] = valid if len(valid) > 1 else valid[0]

    def _add_texts(self, converted: Json, schema: Json) -> None:
        for key in ("title", "description"):
            text = schema.get(key)
            if isinstance(text, str) and text:
                text = self._shorten(text, is_whole=key == "title")
                converted |= {key: self.clean(text)} if text else {}
        texts = {key: schema[key] for key in _TEXTS if isinstance(schema.get(key), str)}
        self._count(0, sum(map(len, texts.values())))
        converted |= texts
        converted |= {key: schema[key] for key in _FLAGS if isinstance(schema.get(key), bool)}
        if schema.get("x-hidden") in (True, "small"):
            converted["x-hidden"] = schema["x-hidden"]

    def _shorten(self, text: str, *, is_whole: bool) -> str:
        """Return the text within the cut. A text that `is_whole` is not shortened but dropped."""
        limit = self.cut.text_chars
        if limit is not None and len(text) > limit:
            text = "" if is_whole or not limit else text[:limit] + "..."
        self._count(0, len(text))
        return text

    def _add_values(self, converted: Json, schema: Json, depth: int) -> None:
        """Keep `enum`, `const`, `default` and `examples`."""
        if isinstance(schema.get("enum"), list) and schema["enum"] and self.cut.has_values:
            self._keep_value(converted, "enum", schema["enum"], depth)
            _agree(converted)
        for key in ("const", "default"):
            if key in schema and self.cut.has_values:
                self._keep_value(converted, key, schema[key], depth)
        if isinstance(schema.get("examples"), list) and self.cut.text_chars is None:
            self._keep_value(converted, "examples", schema["examples"], depth)

    def _keep_value(self, converted: Json, key: str, value: Any, depth: int) -> None:
        self._count(count_values(value, MAX_STEPS))
        if not is_deeper(value, max(0, self.cut.depth - depth - 1)):
            converted[key] = value

    def _add_properties(self, converted: Json, schema: Json, depth: int, above: tuple[str, ...]) -> None:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        if properties or schema.get("properties") == {}:
            converted["properties"] = {name: self._schema(part, depth + 2, above) for name, part in properties.items()}
            self._count(0, sum(map(len, properties)))
        given = schema.get("required")
        given = [given] if isinstance(given, str) else given if isinstance(given, list) else []
        self._count(len(given))
        # Draft 3 says in each property that it is required.
        marked = [name for name, part in properties.items() if isinstance(part, dict) and part.get("required") is True]
        required = list(dict.fromkeys(name for name in [*given, *marked] if isinstance(name, str)))
        converted |= {"required": required} if required else {}
        self._add_dependencies(converted, schema, depth, above)
        more = schema.get("additionalProperties")
        if schema.get("patternProperties"):
            # The names that a regular expression would allow.
            more = True
        if isinstance(more, bool):
            converted["additionalProperties"] = more
        elif isinstance(more, dict):
            converted["additionalProperties"] = self._schema(more, depth + 1, above)

    def _add_dependencies(self, converted: Json, schema: Json, depth: int, above: tuple[str, ...]) -> None:
        rules: Json = {}
        for key in ("dependencies", "dependentRequired", "dependentSchemas"):
            rules |= schema[key] if isinstance(schema.get(key), dict) else {}
        names = {key: [rule] if isinstance(rule, str) else rule for key, rule in rules.items()}
        required = {
            key: [name for name in rule if isinstance(name, str)]
            for key, rule in names.items()
            if isinstance(rule, list)
        }
        schemas = {key: self._schema(rule, depth + 2, above) for key, rule in rules.items() if isinstance(rule, dict)}
        converted |= {"dependentRequired": required} if required else {}
        converted |= {"dependentSchemas": schemas} if schemas else {}

    def _add_items(self, converted: Json, schema: Json, depth: int, above: tuple[str, ...]) -> None:
        items, rest = schema.get("items"), None
        tuple_items = schema.get("prefixItems")
        if isinstance(items, list):
            # Before draft 2020-12, a list of items was what `prefixItems` is now.
            tuple_items, rest = items, schema.get("additionalItems")
        elif isinstance(items, dict | bool):
            rest = items
        if isinstance(tuple_items, list) and tuple_items:
            converted["prefixItems"] = [self._schema(item, depth + 2, above) for item in tuple_items]
        if isinstance(rest, dict) or rest is False:
            converted["items"] = self._schema(rest, depth + 1, above)


def _add_bounds(converted: Json, schema: Json) -> None:
    for key in _COUNTS:
        value: Any = schema.get(key)
        if _is_number(value) and value >= 0 and value == int(value):
            converted[key] = int(value)
    for key in _BOUNDS:
        if _is_number(schema.get(key)):
            converted[key] = schema[key]
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        # Draft 4: a flag, which changes the meaning of the bound.
        if schema.get(exclusive) is True and bound in converted:
            converted[exclusive] = converted.pop(bound)
    step: Any = schema.get("multipleOf", schema.get("divisibleBy"))
    if _is_number(step) and step > 0:
        converted["multipleOf"] = step


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _move_enum(schema: Json) -> Json:
    """Return the schema of a list with the values of its items in `items`. Some servers write them next to it."""
    values, items = schema.get("enum"), schema.get("items", {})
    if schema.get("type") != "array" or not isinstance(values, list) or not isinstance(items, dict):
        return schema
    if any(isinstance(value, list) for value in values):
        return schema
    return {key: schema[key] for key in schema if key != "enum"} | {"items": {"enum": values, **items}}


def _agree(schema: Json) -> None:
    """Remove repeated values of `enum`, and a `type` that none of its values has: no value would fit both."""
    values = {json.dumps(value, sort_keys=True): value for value in schema.get("enum", ())}
    if not values:
        return
    schema["enum"] = list(values.values())
    if "type" in schema and not any(
        Draft202012Validator({"type": schema["type"]}).is_valid(v) for v in values.values()
    ):
        del schema["type"]


def _admit_null(schema: Json) -> Json:
    """Return the schema, which also admits null."""
    rules = schema.keys() - _ABOUT
    if not rules:
        return schema
    if rules <= {"type", "enum"} and "type" in schema:
        kinds = schema["type"]
        types = list(dict.fromkeys([*([kinds] if isinstance(kinds, str) else kinds), "null"]))
        values = {"enum": [*schema["enum"], None]} if "enum" in schema and None not in schema["enum"] else {}
        return {**schema, "type": types, **values}
    about = {key: value for key, value in schema.items() if key in _ABOUT}
    return {**about, "anyOf": [{key: schema[key] for key in schema if key in rules}, {"type": "null"}]}


_ABOUT = frozenset({"title", "description", "default", "examples", *_FLAGS, "x-hidden"})


def _merge(target: Json, siblings: Json) -> Json:
    """Return the target of a reference with the keywords next to the reference."""
    rules = {key: value for key, value in siblings.items() if key not in _ABOUT}
    about = {key: value for key, value in siblings.items() if key in _ABOUT}
    if not rules:
        return {**target, **about}
    return {**rules, "allOf": [target, *rules.get("allOf", [])], **about}


def _as_object(schema: Json) -> Json:
    """Return a schema of an object without alternatives and conditions at its top level, which model servers refuse. A
    property of any alternative is a property of the result.
    """
    properties: Json = {}
    required: dict[str, None] = {}
    more = _collect(schema, properties, required)
    for name in required:
        properties.setdefault(name, {})
    flat: Json = {
        key: schema[key] for key in ("title", "description", "minProperties", "maxProperties") if key in schema
    }
    flat |= {"type": "object", "properties": properties}
    flat |= {"required": list(required)} if required else {}
    flat |= {"additionalProperties": more} if more is not None else {}
    return flat


def _collect(schema: Any, properties: Json, required: dict[str, None]) -> Any:
    """Add the properties of a schema and of its alternatives, and the names that all of them require. Return its
    `additionalProperties`; None if there is none.
    """
    if not isinstance(schema, Mapping):
        return None
    for name, part in schema.get("properties", {}).items():
        properties[name] = (
            part if name not in properties or properties[name] == part else _either(properties[name], part)
        )
    required |= dict.fromkeys(schema.get("required", ()))
    more = [schema.get("additionalProperties")]
    more += [_collect(form, properties, required) for form in schema.get("allOf", ())]
    for key in _ALTERNATIVES:
        names: list[dict[str, None]] = []
        for form in schema.get(key, ()):
            names.append({})
            more.append(_collect(form, properties, names[-1]))
        common = [name for name in names[0] if all(name in each for each in names)] if names else []
        required |= dict.fromkeys(common)
    conditional = [schema.get("then"), schema.get("else"), *schema.get("dependentSchemas", {}).values()]
    more += [_collect(form, properties, {}) for form in conditional]
    return next((one for one in more if one not in (None, False)), more[0])


def _either(first: Any, second: Any) -> Json:
    forms = first["anyOf"] if isinstance(first, dict) and first.keys() == {"anyOf"} else [first]
    return {"anyOf": forms if second in forms else [*forms, second]}
