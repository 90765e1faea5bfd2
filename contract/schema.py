"""Check of arguments against a tool's JSON Schema: replace aliases, convert text, fill defaults, validate. The error
messages tell a model what to change.
"""

import difflib
import itertools
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry
from referencing.exceptions import Unresolvable

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.json_limits import TEXT_UNIT_CHARS, count_values, has_more_values, has_more_values_in_text
from toolcrew.contract.schema_fitting import MAX_NESTED_FORMS, STRICT_VALIDATOR, TooManyReferences, fit, properties_of
from toolcrew.contract.specs import ToolSpec

MAX_NAME_CHARS = 100
"""Limit of the characters of an unknown name that an error message repeats."""
MAX_VALUES = 10_000
"""Limit of the values in the arguments of a call, including nested values."""
MAX_STEPS = 250_000
"""Limit of the work of one check: the number of values in the arguments, multiplied by the number of parts of the
schema. A check compares each value with each part, and one comparison takes up to 7 µs.
"""
MAX_QUICK_VALUES = 1000
MAX_QUICK_STEPS = 10_000

MAX_VALIDATORS = 256
"""Limit of cached validators. A schema that is parsed again, for example from a new catalog, gets a new validator."""

Checks = Iterable[Callable[[Mapping[str, Any]], str | None]]


def prepare_arguments(
    spec: ToolSpec, arguments: Mapping[str, Any], *, text: bool = False, checks: Checks = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments for the tool's handler, and the parameter aliases that were used (`alias -> canonical
    name`).

    Order: conversion of strings (all types only if `text`: the arguments come from a text dialect; otherwise only lists
    and objects that the model wrote as a JSON text), aliases, defaults, schema, custom `checks`. Raises
    ToolFailure(INVALID_ARGUMENTS) for arguments that the model must correct.
    """
    arguments = coerce_text(spec, arguments) if text else arguments
    prepared, aliases = _facts(spec.parameters).prepare(spec.aliases, arguments), list[str]()
    if prepared is None:
        values, aliases = _fold_aliases(spec, _read_json_texts(spec, _ValueBudget(spec).take(arguments)))
        _check_unknown(spec, values)
        prepared, errors = _fit(spec, values)
        if errors:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{spec.name}: " + "; ".join(map(_sentence, errors)))
    for check in checks:
        message = check(prepared)
        if message:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{spec.name}: {message}")
    return prepared, aliases


def coerce_text(spec: ToolSpec, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the strings of a text dialect to the types of the schema, if the conversion is exact. Other values do not
    change. An empty text for an optional parameter that is no text is left out: it has no other meaning.
    """
    properties = properties_of(spec.parameters)
    required: Any = spec.parameters.get("required", ())
    named = {name: spec.aliases.get(name, name) for name in arguments}
    return {
        name: _coerce(schema, value) if (schema := properties.get(named[name])) is not None else value
        for name, value in arguments.items()
        if named[name] in required or not _is_empty_text(properties.get(named[name]), value)
    }


def _read_json_texts(spec: ToolSpec, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with the lists and objects that are JSON texts. Many models send them so, and repeat the
    call unchanged after an error. Only parameters that cannot be texts are read.
    """
    properties = properties_of(spec.parameters)
    return {
        name: _coerce(schema, value)
        if isinstance(value, str)
        and value.lstrip()[:1] in ("[", "{")
        and (schema := properties.get(spec.aliases.get(name, name))) is not None
        else value
        for name, value in arguments.items()
    }


def is_quick(spec: ToolSpec, arguments: Mapping[str, Any], *, text: bool = False) -> bool:
    """Return whether `prepare_arguments` takes at most some tens of milliseconds. Otherwise an event loop must run it
    in a thread.
    """
    facts = _facts(spec.parameters)
    limit = min(MAX_QUICK_VALUES, MAX_QUICK_STEPS // facts.parts)
    if facts.has_list_defaults or has_more_values(arguments, limit):
        return False
    # A longer text may be parsed to more values than the limit.
    long = [name for name, value in arguments.items() if isinstance(value, str) and len(value) > 2 * limit]
    properties = properties_of(spec.parameters)
    return not (text and long) and not any(
        _types_without_text(properties.get(spec.aliases.get(name, name), {})) for name in long
    )


class _ValueBudget:
    """Number of values that the defaults may still add to the arguments of a call."""

    def __init__(self, spec: ToolSpec) -> None:
        self._tool = spec.name
        self._limit = self._remaining = _facts(spec.parameters).max_values

    def take(self, value: Any) -> Any:
        """Count `value` as a part of the arguments, and return it. Raises ToolFailure(INVALID_ARGUMENTS)."""
        self._remaining -= count_values(value, self._remaining)
        if self._remaining < 0:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"{self._tool}: the arguments have more than {self._limit} values ({TEXT_UNIT_CHARS} characters of a "
                "text count as one): pass fewer at a time, or write them to a file",
            )
        return value


def check_schema(parameters: Mapping[str, Any]) -> None:
    """Raise jsonschema.SchemaError if `parameters` is not a JSON Schema (2020-12) of an object, or has a reference to
    something outside itself.
    """
    Draft202012Validator.check_schema(dict(parameters))
    for reference in _references(parameters):
        if not _is_within(parameters, reference):
            raise SchemaError(
                f"the schema refers to '{_short(reference)}', which is not within it: put it under $defs and refer to "
                "#/$defs/NAME"
            )
    if parameters.get("type") != "object":
        raise SchemaError("the schema of the parameters does not say that they are an object: add 'type': 'object'")


def _references(schema: Any) -> Iterator[str]:
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            pending += part.values()
            yield from (part[key] for key in ("$ref", "$dynamicRef") if isinstance(part.get(key), str))
        elif isinstance(part, list):
            pending += part


def _is_within(schema: Mapping[str, Any], reference: str) -> bool:
    return reference.startswith("#") and isinstance(_find(schema, reference), Mapping | bool)


def _find(schema: Mapping[str, Any], reference: str) -> Any:
    """Return the target of a reference into the schema; None if there is none."""
    part: Any = schema
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        part = part.get(name) if isinstance(part, Mapping) else None
    return part


def find_aliases(spec: ToolSpec, arguments: Mapping[str, Any]) -> list[str]:
    """Return the used parameter aliases (`alias -> canonical name`). Raises ToolFailure(INVALID_ARGUMENTS)."""
    return _fold_aliases(spec, arguments)[1]


def _fold_aliases(spec: ToolSpec, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replace aliases by canonical names, also in the objects of a list for the parameters of these objects."""
    used: dict[str, None] = {}
    folded = _fold(spec.name, spec.aliases, arguments, used)
    for name, schema in properties_of(spec.parameters).items():
        items = schema.get("items")
        if isinstance(items, Mapping) and isinstance(folded.get(name), list):
            fields = properties_of(items)
            aliases = {
                alias: canonical
                for alias, canonical in spec.aliases.items()
                if canonical in fields and alias not in fields
            }
            folded[name] = [
                _fold(spec.name, aliases, item, used) if isinstance(item, Mapping) else item for item in folded[name]
            ]
    return folded, list(used)


def _fold(tool: str, aliases: Mapping[str, str], arguments: Mapping[str, Any], used: dict[str, None]) -> dict[str, Any]:
    folded: dict[str, Any] = {}
    # A null beside another name of the parameter means nothing.
    for name, value in sorted(arguments.items(), key=lambda item: item[1] is None):
        canonical = aliases.get(name, name)
        if canonical in folded or (canonical != name and arguments.get(canonical) is not None):
            if value is None:
                continue
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, f"{tool}: '{name}' and '{canonical}' mean the same parameter; give it once"
            )
        if canonical != name:
            used[f"{name} -> {canonical}"] = None
        folded[canonical] = value
    return folded


def _check_unknown(spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
    required: Any = spec.parameters.get("required", ())
    names = list(dict.fromkeys([*properties_of(spec.parameters), *required]))
    if spec.parameters.get("additionalProperties", False) is not False:
        return
    for name in arguments:
        if name not in names:
            near = difflib.get_close_matches(_short(name), names, n=1, cutoff=0.5)
            hint = f"; did you mean '{near[0]}'?" if near else "."
            listing = ", ".join(names) if names else "none"
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"{spec.name}: unknown parameter '{_short(name)}'{hint} Known parameters: {listing}",
            )


def find_nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return the three names that are most similar to `name`, best first."""
    return difflib.get_close_matches(name, list(names), n=3, cutoff=0.0)


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS] + "..."


def _fit(spec: ToolSpec, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[ValidationError]]:
    """Return the arguments with defaults, and the first errors in them."""
    try:
        prepared, errors = fit(
            _facts(spec.parameters).validator, spec.parameters, values, lambda: _ValueBudget(spec).take
        )
        return prepared, sorted(errors, key=lambda error: (list(map(str, error.path)), error.message))
    except RecursionError as error:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"{spec.name}: the arguments nest too deep: send a flatter value"
        ) from error
    except TooManyReferences as error:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"{spec.name}: the arguments nest too deep to be compared with all forms that the schema allows: send a "
            "flatter value",
        ) from error
    except Unresolvable as error:
        raise ToolFailure(
            ErrorCode.INTERNAL, f"{spec.name}: its schema refers to '{_short(error.ref)}', which is not within it"
        ) from error


def _is_empty_text(schema: Mapping[str, Any] | None, value: Any) -> bool:
    return schema is not None and isinstance(value, str) and not value.strip() and bool(_types_without_text(schema))


def _types_without_text(schema: Mapping[str, Any]) -> list[str]:
    """Return the types of the schema; an empty list if it admits texts, or does not say its types."""
    types = _list_types(schema, MAX_NESTED_FORMS)
    return [] if "string" in types else list(types)


def _list_types(schema: Any, nested_forms: int) -> dict[str, None]:
    """Return the types that the schema admits. A schema that does not say its types may admit texts."""
    given = schema.get("type") if isinstance(schema, Mapping) else None
    if given:
        return dict.fromkeys([given] if isinstance(given, str) else given)
    forms = (schema.get("anyOf") or schema.get("oneOf")) if isinstance(schema, Mapping) and nested_forms else None
    found: dict[str, None] = {}
    for form in forms or ({"type": "string"},):
        found |= _list_types(form, nested_forms - 1)
    return found


def _coerce(schema: Mapping[str, Any], value: Any) -> Any:
    """Return a string as the schema's type if the conversion is exact; otherwise the unchanged value, which validation
    then checks.
    """
    types = _types_without_text(schema)
    if not isinstance(value, str) or not types or has_more_values_in_text(value, MAX_VALUES):
        return value
    try:
        parsed = json.loads(_write_as_json(value.strip()), parse_constant=_refuse_constant, strict=False)
    except (ValueError, RecursionError):
        return value
    if isinstance(parsed, float) and parsed.is_integer() and "integer" in types and "number" not in types:
        return int(parsed)
    # null under an optional parameter means that it is absent.
    return parsed if parsed is None or any(_is_type(parsed, kind) for kind in types) else value


def _write_as_json(text: str) -> str:
    """Return the JSON notation of a number or constant in Python's notation; any other text unchanged."""
    number = _NUMBER.fullmatch(text) if len(text) <= MAX_NUMBER_CHARS else None
    if number is None:
        return _CONSTANTS.get(text, text)
    sign, whole, fraction, exponent = number.groups(default="")
    return f"{sign.replace('+', '')}{whole or '0'}{'.' + fraction if fraction else ''}{exponent}"


_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
MAX_NUMBER_CHARS = 400
_NUMBER = re.compile(r"(?=[+-]?[.]?[0-9])([+-]?)([0-9]*)(?:\.((?<=[0-9]\.)[0-9]*|[0-9]+))?([eE][+-]?[0-9]+)?")


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


def _is_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "number":
        return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return kind in _PYTHON_TYPES and isinstance(value, _PYTHON_TYPES[kind])


_PYTHON_TYPES: dict[str, type] = {"integer": int, "object": dict, "array": list, "null": type(None), "string": str}


def _sentence(error: ValidationError) -> str:
    field_path = ".".join(str(part) for part in error.path)
    if error.validator == "required":
        return f"parameter {error.message.split()[0]} is required"
    if error.validator == "type":
        return f"parameter '{field_path}' must be {_join(error.validator_value)}, not {_json_type(error.instance)}"
    message = error.message if len(error.message) <= 300 else error.message[:300] + "..."
    return f"parameter '{field_path}': {message}" if field_path else message


def _join(kinds: Any) -> str:
    return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)


def _json_type(value: Any) -> str:
    for kind in ("boolean", "integer", "number", "string", "array", "object", "null"):
        if _is_type(value, kind):
            return f"{kind} {json.dumps(value, ensure_ascii=False)[:80]}"
    return type(value).__name__


@dataclass(frozen=True)
class _Parameter:
    """Parameter whose schema has one type and simple bounds."""

    kind: str
    bounds: tuple[tuple[Callable[[Any, Any], bool], Any], ...]

    def accepts(self, value: Any) -> bool:
        return _is_type(value, self.kind) and all(holds(value, bound) for holds, bound in self.bounds)


_BOUNDS: Mapping[str, Mapping[str, Callable[[Any, Any], bool]]] = {
    "string": {
        "minLength": lambda value, bound: len(value) >= bound,
        "maxLength": lambda value, bound: len(value) <= bound,
        "enum": lambda value, bound: value in bound,
    },
    "number": {
        "minimum": operator.ge,
        "maximum": operator.le,
        "exclusiveMinimum": operator.gt,
        "exclusiveMaximum": operator.lt,
    },
    "boolean": {},
}
_ANNOTATIONS = {"type", "title", "description", "default"}
_SIMPLE_KEYS = {"type", "properties", "required", "additionalProperties", "title", "description"}


def _simple_parameter(schema: Any) -> _Parameter | None:
    """Return the parameter if its schema uses nothing but _BOUNDS of its type."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    bounds = _BOUNDS.get("number" if kind == "integer" else kind) if isinstance(kind, str) else None
    rules = {name: bound for name, bound in schema.items() if name not in _ANNOTATIONS} if bounds is not None else {}
    if bounds is None or not rules.keys() <= bounds.keys():
        return None
    if any(not isinstance(bound, list if name == "enum" else int | float) for name, bound in rules.items()):
        return None
    return _Parameter(str(kind), tuple((bounds[name], bound) for name, bound in rules.items()))


@dataclass(frozen=True)
class _Facts:
    """Prepared information about a schema. `parts`: the highest number of parts of the schema that the check of one
    value reads. `simple`: its simple parameters, by name. `simple` is None if a default is a list or an object, or
    if the schema has other rules than parameters and required names; then only `validator` decides. `defaults`: the
    defaults that fit their own schema.
    """

    schema: Mapping[str, Any]
    validator: Any
    parts: int
    has_list_defaults: bool
    simple: Mapping[str, _Parameter] | None
    defaults: Mapping[str, Any]

    @property
    def max_values(self) -> int:
        """Limit of the values in the arguments."""
        return min(MAX_VALUES, MAX_STEPS // self.parts)

    def prepare(self, aliases: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments with defaults if simple checks show that they are valid. None means that the general
        check must decide.

        Nearly all calls have only a few texts and numbers. For them the general check is more than ten times slower,
        and it runs once in the orchestrator and once in the worker.
        """
        if self.simple is None or any(name not in values for name in self.schema.get("required", ())):
            return None
        count = 1 + len(values) + len(self.defaults)
        for name, value in values.items():
            parameter = self.simple.get(name)
            if parameter is None or name in aliases or not parameter.accepts(value):
                return None
            count += len(value) // TEXT_UNIT_CHARS if isinstance(value, str) else 0
        if count > self.max_values:
            return None
        return {**values, **{name: value for name, value in self.defaults.items() if name not in values}}


_FACTS: dict[int, _Facts] = {}
"""Facts by the identity of the schema, because a key from its text would be slow to build for every call. The facts
hold the schema, so that no other object can get the same identity.
"""


def _facts(schema: Mapping[str, Any]) -> _Facts:
    cached = _FACTS.get(id(schema))
    if cached is None:
        if len(_FACTS) >= MAX_VALIDATORS:
            _FACTS.clear()
        # An empty registry, so that no reference of an untrusted schema is fetched from the network.
        validator = STRICT_VALIDATOR(schema, registry=Registry())
        parts = [part for part, is_repeated in itertools.islice(applied_schemas(schema), MAX_STEPS) if not is_repeated]
        count = min(MAX_STEPS, sum(map(count_parts, parts)))
        has_lists = any(isinstance(default := part.get("default"), dict | list) and default for part in parts)
        properties = properties_of(schema)
        defaults = {name: part["default"] for name, part in properties.items() if "default" in part}
        is_simple = not has_lists and count * count <= MAX_STEPS and schema.keys() <= _SIMPLE_KEYS
        is_simple = is_simple and not any(isinstance(default, dict | list) for default in defaults.values())
        if is_simple:
            # Without required names, so that only the defaults decide.
            optional = {key: rule for key, rule in schema.items() if key != "required"}
            defaults, _ = fit(validator.evolve(schema=optional), optional, {}, lambda: lambda value: value)
        parameters = {name: _simple_parameter(part) for name, part in properties.items()}
        simple = {name: parameter for name, parameter in parameters.items() if parameter is not None}
        cached = _FACTS[id(schema)] = _Facts(
            schema, validator, count, has_lists, simple if is_simple else None, defaults
        )
    return cached


_NAMED = ("properties", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = (
    *("items", "contains", "unevaluatedItems", "additionalProperties", "propertyNames", "unevaluatedProperties"),
    *("not", "if", "then", "else"),
)


def applied_schemas(schema: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Yield each schema that a check of one value may use, including targets of references, and whether the schema
    refers back to a schema around it.
    """
    pending = [(schema, frozenset[str]())]
    while pending:
        part, above = pending.pop()
        yield part, False
        for key in ("$ref", "$dynamicRef"):
            if not isinstance(reference := part.get(key), str):
                continue
            target = _find(schema, reference)
            if reference in above:
                yield part, True
            elif isinstance(target, Mapping):
                pending.append((target, above | {reference}))
        pending += [(inner, above) for inner in _inner_schemas(part)]


def _inner_schemas(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for key, value in part.items():
        if key in _NAMED and isinstance(value, Mapping):
            found: Iterable[Any] = value.values()
        else:
            found = value if key in _LISTS and isinstance(value, list) else (value,) if key in _SINGLE else ()
        yield from (one if isinstance(one, Mapping) else {} for one in found if isinstance(one, Mapping | bool))


def count_parts(schema: Mapping[str, Any]) -> int:
    """Return the number of parts of a schema without nested schemas: the schema itself, and the values of its lists,
    such as `enum`.
    """
    values = (value for key, value in schema.items() if key not in _HOLDERS and isinstance(value, dict | list))
    return 1 + sum(count_values(value, MAX_STEPS) for value in values)


_HOLDERS = frozenset((*_NAMED, *_LISTS, *_SINGLE, "$defs", "definitions"))
