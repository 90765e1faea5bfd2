"""Fitting of arguments to a JSON Schema: validation in bounded time, defaults, and values that mean the same in another
notation.

Three values are changed instead of refused, and only where the schema refuses them as they are:

- null under an optional property: the property is left out.
- a number without a fraction, such as 5.0, where the schema wants an integer: it becomes an integer.
- a default that does not fit its own schema: it is not filled in.
"""

import copy
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

MAX_ERRORS = 5
"""Limit of the errors that a validation collects. Each error takes kilobytes."""
MAX_ROUNDS = 3
"""Limit of the validations of one value. A change of one round may show a default that does not fit in the next one."""
MAX_NESTED_FORMS = 3
"""Depth of `anyOf` and `oneOf` up to which values inside are changed. Each level validates the value once more."""

MAX_REFERENCES = 20_000
"""Limit of the references that the validations of one value follow: about 2 seconds. Where several forms refer to the
whole schema, each level of the value multiplies their number.
"""

Path = tuple[Any, ...]
Take = Callable[[Any], Any]
_ABSENT = object()


class TooManyReferences(Exception):
    """Raised when a validation follows more than MAX_REFERENCES references."""


_followed: ContextVar[list[int] | None] = ContextVar("followed_references", default=None)


def fit(
    validator: Any, schema: Mapping[str, Any], values: Mapping[str, Any], open_budget: Callable[[], Take]
) -> tuple[dict[str, Any], list[ValidationError]]:
    """Return `values` with defaults and with the changes above, and the errors that remain, at most MAX_ERRORS.

    `open_budget` returns, for each round, the function that counts the values. Raises TooManyReferences.
    """
    token = _followed.set([0])
    try:
        return _fit(validator, schema, values, open_budget)
    finally:
        _followed.reset(token)


def _fit(
    validator: Any, schema: Mapping[str, Any], values: Mapping[str, Any], open_budget: Callable[[], Take]
) -> tuple[dict[str, Any], list[ValidationError]]:
    defaults, value = _Defaults(schema), dict(values)
    for _ in range(MAX_ROUNDS):
        take = open_budget()
        value = defaults.add(take(value), take)
        errors, changes = _inspect(validator, value, defaults, MAX_NESTED_FORMS)
        if errors or not changes:
            return value, errors
        value = _change(value, changes)
        defaults.forget(path for path, new in changes.items() if new is _ABSENT)
    return value, list(itertools.islice(validator.iter_errors(value), MAX_ERRORS))


@dataclass
class _Defaults:
    """Defaults of a schema's properties, which `add` fills in. It skips those that `forget` has received."""

    schema: Mapping[str, Any]
    filled: set[Path] = field(default_factory=set)
    unfit: set[Path] = field(default_factory=set)

    def add(self, values: Mapping[str, Any], take: Take) -> dict[str, Any]:
        """Return a copy of `values` with the defaults. `take` counts each default that is used, because a schema of a
        few hundred bytes with nested defaults can expand to gigabytes.
        """
        return self._add_to_object(self.schema, values, (), take)

    def holder(self, path: Path) -> Path | None:
        """Return the path of the innermost default that contains the value at `path`; None if the caller sent it."""
        starts = (path[:length] for length in range(len(path), 0, -1))
        return next((start for start in starts if start in self.filled), None)

    def forget(self, paths: Iterator[Path]) -> None:
        removed = self.filled & set(paths)
        self.filled -= removed
        self.unfit |= removed

    def _add(self, schema: Mapping[str, Any], value: Any, path: Path, take: Take) -> Any:
        if isinstance(value, dict):
            return self._add_to_object(schema, value, path, take)
        items = schema.get("items")
        if isinstance(value, list) and isinstance(items, Mapping):
            return [self._add(items, item, (*path, number), take) for number, item in enumerate(value)]
        return value

    def _add_to_object(
        self, schema: Mapping[str, Any], values: Mapping[str, Any], path: Path, take: Take
    ) -> dict[str, Any]:
        filled = dict(values)
        for name, sub in properties_of(schema).items():
            at = (*path, name)
            if name not in filled and "default" in sub and at not in self.unfit:
                filled[name] = copy.deepcopy(take(sub["default"]))
                self.filled.add(at)
            if name in filled:
                filled[name] = self._add(sub, filled[name], at, take)
        return filled


def _inspect(
    validator: Any, value: Any, defaults: _Defaults | None, nested_forms: int
) -> tuple[list[ValidationError], dict[Path, Any]]:
    """Return the errors that no change removes, and the changes for the others: path -> new value or _ABSENT."""
    errors: list[ValidationError] = []
    changes: dict[Path, Any] = {}
    for error in validator.iter_errors(value):
        change = _find_change(validator, error, defaults, nested_forms)
        if change is None:
            errors.append(error)
            if len(errors) == MAX_ERRORS:
                break
        else:
            changes[change[0]] = change[1]
    return errors, changes


def _find_change(
    validator: Any, error: ValidationError, defaults: _Defaults | None, nested_forms: int
) -> tuple[Path, Any] | None:
    """Return the path and the new value that remove an error; None if the caller must correct the value."""
    path, instance, rule = tuple(error.absolute_path), error.instance, error.validator_value
    if isinstance(error, _MeaninglessNull):
        return path, _ABSENT
    if error.validator == "type" and isinstance(instance, float) and instance.is_integer() and _wants_integer(rule):
        return path, int(instance)
    if error.validator in ("anyOf", "oneOf") and nested_forms > 0:
        new = _fit_one_form(validator, rule, instance, nested_forms - 1)
        if new is not _ABSENT:
            return path, new
    holder = defaults.holder(path) if defaults is not None else None
    return (holder, _ABSENT) if holder is not None else None


def _fit_one_form(validator: Any, forms: Any, value: Any, nested_forms: int) -> Any:
    """Return the value as the first form of an `anyOf` or `oneOf` accepts it after changes; _ABSENT if none does."""
    for form in forms:
        if isinstance(form, Mapping):
            branch = validator.evolve(schema=form)
            errors, changes = _inspect(branch, value, None, nested_forms)
            if changes and not errors:
                new = _change(value, changes)
                if branch.is_valid(new):
                    return new
    return _ABSENT


def _change(value: Any, changes: Mapping[Path, Any]) -> Any:
    """Return a copy of the value with the changes. Removes no item of a list, so that every path stays valid."""
    if () in changes:
        return changes[()]
    value = _copy(value)
    # Inner values first: a later change may replace the object around them.
    for path, new in sorted(changes.items(), key=lambda change: -len(change[0])):
        part = value
        for step in path[:-1]:
            part = part[step]
        if new is _ABSENT:
            part.pop(path[-1], None)
        else:
            part[path[-1]] = new
    return value


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copy(part) for name, part in value.items()}
    return [_copy(part) for part in value] if isinstance(value, list) else value


def _wants_integer(kinds: Any) -> bool:
    return kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds)


def properties_of(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the properties, except those that are only true or false."""
    properties = schema.get("properties", {})
    return {name: sub for name, sub in properties.items() if isinstance(sub, Mapping)}


class _MeaninglessNull(ValidationError):
    """Error for null under an optional property that does not admit null."""


def _is_whole(_checker: Any, instance: Any) -> bool:
    return isinstance(instance, int) and not isinstance(instance, bool)


def _check_unique(_validator: Any, is_unique: bool, instance: Any, _schema: Any) -> Iterator[ValidationError]:
    """Check `uniqueItems` in linear time. The library compares every item with every other item."""
    if is_unique and isinstance(instance, list) and len({_canonical(item) for item in instance}) < len(instance):
        yield ValidationError("the items must differ from each other")


def _check_any(validator: Any, schemas: list[Any], instance: Any, _schema: Any) -> Iterator[ValidationError]:
    """Check `anyOf` without collecting the errors of each alternative, which the library would keep in memory."""
    if not any(validator.evolve(schema=schema).is_valid(instance) for schema in schemas):
        yield ValidationError("it fits none of the forms that the schema allows")


def _check_one(validator: Any, schemas: list[Any], instance: Any, _schema: Any) -> Iterator[ValidationError]:
    fitting = sum(validator.evolve(schema=schema).is_valid(instance) for schema in schemas)
    if fitting != 1:
        yield ValidationError(f"it must fit one of the forms that the schema allows, and fits {fitting or 'none'}")


def _canonical(value: Any) -> str:
    """Return a text that is equal for values that are equal in JSON Schema: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_with_whole_numbers(value), sort_keys=True)


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_whole_numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_properties(
    validator: Any, properties: Mapping[str, Any], instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    """Check `properties` as the library does, and mark the nulls that mean that a property is absent."""
    if not isinstance(instance, dict):
        return
    for name, sub in properties.items():
        if name in instance:
            is_optional_null = instance[name] is None and name not in schema.get("required", ())
            for error in validator.descend(instance[name], sub, path=name, schema_path=name):
                yield _MeaninglessNull.create_from(error) if is_optional_null else error


def _check_multiple(_validator: Any, step: Any, instance: Any, _schema: Any) -> Iterator[ValidationError]:
    """Check `multipleOf` with decimal numbers, as they are written: as binary floats, 19.99 is no multiple of 0.01."""
    is_number = isinstance(instance, int | float) and not isinstance(instance, bool)
    if is_number and (not abs(instance) < math.inf or _as_written(instance) % _as_written(step)):
        shown = instance if abs(instance) < 10**40 else "the number"
        yield ValidationError(f"{shown} is not a multiple of {step}")


def _as_written(number: float) -> Fraction:
    return Fraction(number) if isinstance(number, int) else Fraction(repr(number))


def _count_references(follow: Any) -> Any:
    """Return the rule of the library for a reference, which counts what it follows."""

    def check(validator: Any, reference: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if (followed := _followed.get()) is not None:
            followed[0] += 1
            if followed[0] > MAX_REFERENCES:
                raise TooManyReferences
        yield from follow(validator, reference, instance, schema) or ()

    return check


STRICT_VALIDATOR = extend(  # type: ignore[no-untyped-call]
    Draft202012Validator,
    {
        "uniqueItems": _check_unique,
        "anyOf": _check_any,
        "oneOf": _check_one,
        "properties": _check_properties,
        "multipleOf": _check_multiple,
        **{name: _count_references(Draft202012Validator.VALIDATORS[name]) for name in ("$ref", "$dynamicRef")},
    },
    # 5.0 for an integer is a type error that `fit` removes: tools receive int and not float.
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_whole),
)
