"""Arguments against a tool's JSON Schema: fold aliases, coerce text, fill defaults, validate. Sentences a model can act
on.
"""

import copy
import difflib
import itertools
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable

from contract.errors import ErrorCode, ToolFailure
from contract.json_limits import TEXT_UNIT_CHARS, count_values, has_more_values, has_more_values_in_text
from contract.specs import ToolSpec

MAX_NAME_CHARS = 100
"""Of a name that a model made up, as much is repeated in a sentence."""
MAX_VALUES = 10_000
"""Values in the arguments of a call, those inside of others included."""
MAX_STEPS = 250_000
"""Values in the arguments of a call times parts of the schema. A check looks at each part for each value; a step takes
up to 7 µs.
"""
MAX_QUICK_VALUES = 1000
MAX_QUICK_STEPS = 10_000
MAX_ERRORS = 5
"""Errors of a validation that are looked for; each takes kilobytes."""

MAX_VALIDATORS = 256
"""Kept; a schema that is read again, as from a new catalog, has a new one."""

Take = Callable[[Any], Any]
Checks = Iterable[Callable[[Mapping[str, Any]], str | None]]


def prepare_arguments(
    spec: ToolSpec, arguments: Mapping[str, Any], *, text: bool = False, checks: Checks = ()
) -> tuple[dict[str, Any], list[str]]:
    """Arguments as the tool's handler gets them, and the aliases that were used (`given -> canonical`).

    Order: coercion of strings (only when `text`: the arguments came from a text dialect), aliases, defaults, schema,
    custom `checks`. Raises ToolFailure(INVALID_ARGUMENTS), the model's fault.
    """
    arguments = coerce_text(spec, arguments) if text else arguments
    prepared, aliases = _facts(spec.parameters).prepare(spec.aliases, arguments), list[str]()
    if prepared is None:
        room = _Room(spec)
        given, aliases = _fold_aliases(spec, room.take(arguments))
        _check_unknown(spec, given)
        prepared = _fill_object(spec.parameters, given, room.take)
        if errors := _errors(spec, prepared):
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{spec.name}: " + "; ".join(map(_sentence, errors)))
    for check in checks:
        complaint = check(prepared)
        if complaint:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{spec.name}: {complaint}")
    return prepared, aliases


def coerce_text(spec: ToolSpec, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that a text dialect read, strings, as the types of the schema where the conversion is exact. Nothing
    else is touched.
    """
    properties = _properties(spec.parameters)
    named = {name: properties.get(spec.aliases.get(name, name)) for name in arguments}
    return {
        name: _coerce(schema, value) if (schema := named[name]) is not None else value
        for name, value in arguments.items()
    }


def is_quick(spec: ToolSpec, arguments: Mapping[str, Any], *, text: bool = False) -> bool:
    """Whether `prepare_arguments` takes at most some tens of milliseconds. Otherwise an event loop has it run in a
    thread.
    """
    facts = _facts(spec.parameters)
    limit = min(MAX_QUICK_VALUES, MAX_QUICK_STEPS // facts.parts)
    if facts.has_list_defaults or has_more_values(arguments, limit):
        return False
    # A text of so many characters may be read as more values than that.
    return not (text and any(isinstance(value, str) and len(value) > 2 * limit for value in arguments.values()))


class _Room:
    """How many values the arguments of a call may still get."""

    def __init__(self, spec: ToolSpec) -> None:
        self._tool = spec.name
        self._limit = self._left = _facts(spec.parameters).max_values

    def take(self, value: Any) -> Any:
        """`value`, which becomes a part of the arguments. Raises ToolFailure(INVALID_ARGUMENTS)."""
        self._left -= count_values(value, self._left)
        if self._left < 0:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"{self._tool}: the arguments have more than {self._limit} values ({TEXT_UNIT_CHARS} characters of a "
                "text count as one): pass fewer at a time, or write them to a file",
            )
        return value


def check_schema(parameters: Mapping[str, Any]) -> None:
    """Raises jsonschema.SchemaError when `parameters` is not a JSON Schema (2020-12) of an object, or refers to what is
    not within it.
    """
    Draft202012Validator.check_schema(dict(parameters))
    for reference in _references(parameters):
        if not _is_within(parameters, reference):
            raise SchemaError(
                f"the schema refers to '{_short(reference)}', which is not within it: put it under $defs and refer to "
                "#/$defs/NAME"
            )
    if parameters.get("type") != "object":
        raise SchemaError("parameters of a tool are an object: its schema must say so with 'type': 'object'")


def _references(schema: Any) -> Iterator[str]:
    """Every `$ref` in a schema, wherever it stands."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            left += part.values()
            yield from (part[key] for key in ("$ref", "$dynamicRef") if isinstance(part.get(key), str))
        elif isinstance(part, list):
            left += part


def _is_within(schema: Mapping[str, Any], reference: str) -> bool:
    return reference.startswith("#") and isinstance(_find(schema, reference), Mapping | bool)


def _find(schema: Mapping[str, Any], reference: str) -> Any:
    """What a reference into the schema leads to; None if there is nothing."""
    part: Any = schema
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        part = part.get(name) if isinstance(part, Mapping) else None
    return part


def find_aliases(spec: ToolSpec, arguments: Mapping[str, Any]) -> list[str]:
    """The aliases that were used, as prepare_arguments tells them. Raises ToolFailure(INVALID_ARGUMENTS)."""
    return _fold_aliases(spec, arguments)[1]


def _fold_aliases(spec: ToolSpec, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Also in the objects of a list, for the parameters that these have themselves."""
    used: dict[str, None] = {}
    folded = _fold(spec.name, spec.aliases, arguments, used)
    for name, schema in _properties(spec.parameters).items():
        items = schema.get("items")
        if isinstance(items, Mapping) and isinstance(folded.get(name), list):
            fields = _properties(items)
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
    for name, value in arguments.items():
        canonical = aliases.get(name, name)
        if canonical in folded or (canonical != name and canonical in arguments):
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, f"{tool}: '{name}' and '{canonical}' mean the same parameter; give it once"
            )
        if canonical != name:
            used[f"{name} -> {canonical}"] = None
        folded[canonical] = value
    return folded


def _check_unknown(spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
    known = list(_properties(spec.parameters))
    if spec.parameters.get("additionalProperties", False) is not False:
        return
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(_short(name), known, n=1, cutoff=0.5)
            hint = f"; did you mean '{near[0]}'?" if near else "."
            listing = ", ".join(known) if known else "none"
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"{spec.name}: unknown parameter '{_short(name)}'{hint} Known parameters: {listing}",
            )


def find_nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return the three of `names` that are most like `name`, best first."""
    return difflib.get_close_matches(name, list(names), n=3, cutoff=0.0)


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS] + "..."


def _errors(spec: ToolSpec, prepared: dict[str, Any]) -> list[ValidationError]:
    """Return the first errors in arguments that have their defaults."""
    try:
        found = _facts(spec.parameters).validator.iter_errors(prepared)
        return sorted(
            itertools.islice(found, MAX_ERRORS), key=lambda error: (list(map(str, error.path)), error.message)
        )
    except RecursionError as error:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{spec.name}: the arguments nest too deep") from error
    except OverflowError as error:
        # A whole number may be larger than the fraction that it is to be a multiple of can be divided into.
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"{spec.name}: a number in the arguments is too large"
        ) from error
    except Unresolvable as error:
        raise ToolFailure(
            ErrorCode.INTERNAL, f"{spec.name}: its schema refers to '{_short(error.ref)}', which is not within it"
        ) from error


def _fill(schema: Mapping[str, Any], value: Any, take: Take) -> Any:
    """A copy of `value` with the defaults of the objects inside."""
    if isinstance(value, dict):
        return _fill_object(schema, value, take)
    items = schema.get("items")
    if isinstance(value, list) and isinstance(items, Mapping):
        return [_fill(items, item, take) for item in value]
    return value


def _fill_object(schema: Mapping[str, Any], given: Mapping[str, Any], take: Take) -> dict[str, Any]:
    """`take` gets each default that is used: a few hundred bytes of lists as defaults inside each other stand for
    gigabytes.
    """
    filled = dict(given)
    for name, sub in _properties(schema).items():
        if name not in filled and "default" in sub:
            filled[name] = copy.deepcopy(take(sub["default"]))
        if name in filled:
            filled[name] = _fill(sub, filled[name], take)
    return filled


def _coerce(schema: Mapping[str, Any], value: Any) -> Any:
    """A string as the schema's type where the conversion is exact; otherwise the value as it is, for validation to
    judge.
    """
    if not isinstance(value, str):
        return value
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else list(types)
    if "string" in types or not types:
        return value
    if has_more_values_in_text(value, MAX_VALUES):
        return value
    try:
        parsed = json.loads(value.strip(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return value
    return parsed if any(_is_type(parsed, kind) for kind in types) else value


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


def _is_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "number":
        return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return kind in _PYTHON_TYPES and isinstance(value, _PYTHON_TYPES[kind])


_PYTHON_TYPES: dict[str, type] = {"integer": int, "object": dict, "array": list, "null": type(None), "string": str}


def _properties(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    properties = schema.get("properties", {})
    return {name: sub for name, sub in properties.items() if isinstance(sub, Mapping)}


def _sentence(error: ValidationError) -> str:
    where = ".".join(str(part) for part in error.path)
    if error.validator == "required":
        return f"parameter {error.message.split()[0]} is required"
    if error.validator == "type":
        return f"parameter '{where}' must be {_join(error.validator_value)}, not {_json_type(error.instance)}"
    message = error.message if len(error.message) <= 300 else error.message[:300] + "..."
    return f"parameter '{where}': {message}" if where else message


def _join(kinds: Any) -> str:
    return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)


def _json_type(value: Any) -> str:
    for kind in ("boolean", "integer", "number", "string", "array", "object", "null"):
        if _is_type(value, kind):
            return f"{kind} {json.dumps(value, ensure_ascii=False)[:80]}"
    return type(value).__name__


def _is_whole(_checker: Any, instance: Any) -> bool:
    return isinstance(instance, int) and not isinstance(instance, bool)


def _check_unique(_validator: Any, is_wanted: bool, instance: Any, _schema: Any) -> Iterator[ValidationError]:
    """`uniqueItems` in linear time: the library compares every item with every other one."""
    if is_wanted and isinstance(instance, list) and len({_canonical(item) for item in instance}) < len(instance):
        yield ValidationError("the items must differ from each other")


def _check_any(validator: Any, schemas: list[Any], instance: Any, _schema: Any) -> Iterator[ValidationError]:
    """`anyOf` without the errors of each alternative, which nothing reads: the library keeps all of them."""
    if not any(validator.evolve(schema=schema).is_valid(instance) for schema in schemas):
        yield ValidationError("it fits none of the forms that the schema allows")


def _check_one(validator: Any, schemas: list[Any], instance: Any, _schema: Any) -> Iterator[ValidationError]:
    fitting = sum(validator.evolve(schema=schema).is_valid(instance) for schema in schemas)
    if fitting != 1:
        yield ValidationError(f"it must fit one of the forms that the schema allows, and fits {fitting or 'none'}")


def _canonical(value: Any) -> str:
    """Equal for values that JSON Schema takes for equal: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_with_whole_numbers(value), sort_keys=True)


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_whole_numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


_STRICT = extend(  # type: ignore[no-untyped-call]
    Draft202012Validator,
    {"uniqueItems": _check_unique, "anyOf": _check_any, "oneOf": _check_one},
    # A native call that sends 5.0 for an integer is a type error here: tools get ints, not floats.
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_whole),
)


@dataclass(frozen=True)
class _Parameter:
    """A parameter whose schema asks for one type and simple bounds."""

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
    known = _BOUNDS.get("number" if kind == "integer" else kind) if isinstance(kind, str) else None
    rules = {name: bound for name, bound in schema.items() if name not in _ANNOTATIONS} if known is not None else {}
    if known is None or not rules.keys() <= known.keys():
        return None
    if any(not isinstance(bound, list if name == "enum" else int | float) for name, bound in rules.items()):
        return None
    return _Parameter(str(kind), tuple((known[name], bound) for name, bound in rules.items()))


@dataclass(frozen=True)
class _Facts:
    """Facts about a schema. `parts`: how many parts a check of one value looks at, at most. `simple`: its simple
    parameters, by name; None when a default is a list or does not fit, or the schema asks for more than parameters
    and which of them are required: then `validator` decides alone. `defaults`: of all its parameters.
    """

    schema: Mapping[str, Any]
    validator: Any
    parts: int
    has_list_defaults: bool
    simple: Mapping[str, _Parameter] | None
    defaults: Mapping[str, Any]

    @property
    def max_values(self) -> int:
        """How many values arguments may have."""
        return min(MAX_VALUES, MAX_STEPS // self.parts)

    def prepare(self, aliases: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments with their defaults if they are valid by simple checks. None says nothing about them.

        Nearly all calls have a few texts and numbers under the names of the schema. The general way takes more than ten
        times as long for them, once in the orchestrator and once in the worker.
        """
        if self.simple is None or any(name not in given for name in self.schema.get("required", ())):
            return None
        count = 1 + len(given) + len(self.defaults)
        for name, value in given.items():
            parameter = self.simple.get(name)
            if parameter is None or name in aliases or not parameter.accepts(value):
                return None
            count += len(value) // TEXT_UNIT_CHARS if isinstance(value, str) else 0
        if count > self.max_values:
            return None
        return {**given, **{name: value for name, value in self.defaults.items() if name not in given}}


_FACTS: dict[int, _Facts] = {}
"""By the identity of the schema: its text would have to be built for every call. The schema is kept with them, so that
no other one gets its identity.
"""


def _facts(schema: Mapping[str, Any]) -> _Facts:
    known = _FACTS.get(id(schema))
    if known is None:
        if len(_FACTS) >= MAX_VALIDATORS:
            _FACTS.clear()
        # An empty registry: what a schema refers to is never fetched, whoever wrote it.
        validator = _STRICT(schema, registry=Registry())
        parts = [part for part, is_repeated in itertools.islice(applied_schemas(schema), MAX_STEPS) if not is_repeated]
        count = min(MAX_STEPS, sum(map(count_parts, parts)))
        has_lists = any(isinstance(default := part.get("default"), dict | list) and default for part in parts)
        has_sound_defaults = (
            not has_lists
            and count * count <= MAX_STEPS
            and not any(error.path for error in validator.iter_errors(_fill_object(schema, {}, lambda value: value)))
        )
        properties = _properties(schema)
        defaults = {name: part["default"] for name, part in properties.items() if "default" in part}
        is_simple = has_sound_defaults and schema.keys() <= _SIMPLE_KEYS
        is_simple = is_simple and not any(isinstance(default, dict | list) for default in defaults.values())
        parameters = {name: _simple_parameter(part) for name, part in properties.items()}
        simple = {name: parameter for name, parameter in parameters.items() if parameter is not None}
        known = _FACTS[id(schema)] = _Facts(
            schema, validator, count, has_lists, simple if is_simple else None, defaults
        )
    return known


_NAMED = ("properties", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = (
    *("items", "contains", "unevaluatedItems", "additionalProperties", "propertyNames", "unevaluatedProperties"),
    *("not", "if", "then", "else"),
)


def applied_schemas(schema: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Yield each schema that a check of one value may look at, references followed, with whether a reference leads back
    to it from inside.
    """
    left = [(schema, frozenset[str]())]
    while left:
        part, above = left.pop()
        yield part, False
        for key in ("$ref", "$dynamicRef"):
            if not isinstance(reference := part.get(key), str):
                continue
            target = _find(schema, reference)
            if reference in above:
                yield part, True
            elif isinstance(target, Mapping):
                left.append((target, above | {reference}))
        left += [(one, above) for one in _inner_schemas(part)]


def _inner_schemas(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for key, value in part.items():
        if key in _NAMED and isinstance(value, Mapping):
            found: Iterable[Any] = value.values()
        else:
            found = value if key in _LISTS and isinstance(value, list) else (value,) if key in _SINGLE else ()
        yield from (one if isinstance(one, Mapping) else {} for one in found if isinstance(one, Mapping | bool))


def count_parts(schema: Mapping[str, Any]) -> int:
    """Return how much of a schema is looked at, without the schemas inside: itself, and the values of its lists, as in
    `enum`.
    """
    values = (value for key, value in schema.items() if key not in _HOLDERS and isinstance(value, dict | list))
    return 1 + sum(count_values(value, MAX_STEPS) for value in values)


_HOLDERS = frozenset((*_NAMED, *_LISTS, *_SINGLE, "$defs", "definitions"))
