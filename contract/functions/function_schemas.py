"""Conversion of a Python signature to a tool's JSON Schema, and of a call's JSON arguments to Python arguments."""

import functools
import inspect
import math
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ForwardRef, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import (
    PydanticInvalidForJsonSchema,
    PydanticSchemaGenerationError,
    PydanticUndefinedAnnotation,
    PydanticUserError,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import PydanticJsonSchemaWarning

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.functions.call_context import CallContext, FunctionHandler
from toolcrew.contract.functions.docstrings import Docstring, parse_docstring
from toolcrew.contract.functions.json_schemas import JsonSchema, plain_schema
from toolcrew.contract.invalid_input import explain_errors, format_path

CONTEXT_NAMES = frozenset({"context", "ctx"})
"""Names of parameters that receive the context if they have no annotation. A parameter annotated CallContext receives
the context under any name.
"""

_UNFIT = (
    PydanticSchemaGenerationError,
    PydanticInvalidForJsonSchema,
    PydanticUndefinedAnnotation,
    PydanticUserError,
    TypeError,
    NameError,
)


@dataclass(frozen=True)
class FunctionShape:
    """The parameters of a function and their JSON Schema, found without calling the function."""

    name: str
    docstring: Docstring
    schema: JsonSchema
    """Return the schema from pydantic, with references inlined and titles removed."""
    _model: type[BaseModel]
    _fields: Mapping[str, str]
    """Parameter -> field of the model. The fields have generated names, because pydantic refuses fields that are called
    `schema` or `_x`.
    """
    positional: tuple[str, ...] = ()
    """Names of the parameters that are given by position only."""
    _context: frozenset[str] = frozenset()
    _extra: TypeAdapter[dict[str, Any]] | None = field(default=None)

    @property
    def is_open(self) -> bool:
        """True if the function takes `**kwargs`, so that a call may contain any other arguments."""
        return self._extra is not None

    def bind(self, arguments: Mapping[str, Any], context: CallContext) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and the keyword arguments, converted to the annotated types. Raises
        ToolFailure(INVALID_ARGUMENTS) with the values that do not fit.
        """
        try:
            checked = self._model.model_validate(
                {name: value for name, value in arguments.items() if name in self._fields}
            )
            extra = {name: value for name, value in arguments.items() if name not in self._fields}
            values = {name: getattr(checked, model_field) for name, model_field in self._fields.items()}
            if self._extra is not None:
                values.update(self._extra.validate_python(extra))
            elif extra:
                raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{self.name}: unknown parameter '{next(iter(extra))}'")
        except ValidationError as error:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{self.name}: {_describe_errors(error)}") from error
        values.update(dict.fromkeys(self._context, context))
        return [values.pop(name) for name in self.positional], values


def read_function(function: Callable[..., Any], *, name: str | None = None) -> FunctionShape:
    """Return the shape of `function`. Raises TypeError, with function and parameter, for a type without JSON form."""
    name = name or function_name(function)
    docstring = parse_docstring(_docstring_of(function))
    parameters = _parameters(function, name)
    context = frozenset(parameter.name for parameter in parameters if _is_context(parameter))
    _check_docstring(name, docstring, parameters)
    extra = None
    fields: dict[str, Any] = {}
    field_names: dict[str, str] = {}
    for parameter in parameters:
        if parameter.name in context:
            continue
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            extra = _extra_adapter(parameter, name)
            continue
        field_names[parameter.name] = f"p{len(field_names)}"
        fields[field_names[parameter.name]] = _field(parameter, docstring)
    model = _build_model(name, fields)
    return FunctionShape(
        name=name,
        docstring=docstring,
        schema=_schema(model, extra),
        _model=model,
        _fields=field_names,
        positional=tuple(
            parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.POSITIONAL_ONLY
        ),
        _context=context,
        _extra=extra,
    )


def tool_parameters(shape: FunctionShape) -> JsonSchema:
    """Return the parameter schema of a ToolSpec. The schema refuses unknown names unless the function takes
    `**kwargs`, and writes unions with null as a list of types.
    """
    plain = plain_schema(shape.schema, null_as_type=True)
    return plain if shape.is_open else {**plain, "additionalProperties": False}


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, of the function in a `functools.partial`, or of a callable object's class."""
    inner = _target(function)
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call of the function returns a coroutine: an `async def` function, method or `__call__`, also
    inside a `functools.partial`.
    """
    inner = _target(function)
    if isinstance(inner, FunctionHandler):
        return inner.returns_coroutine
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def takes_second_argument(function: Callable[..., Any]) -> bool:
    """Return whether the function takes the context as its second argument.

    Returns False if the signature cannot be read. Returns False also for a second parameter that has a default and is
    not a context by name or annotation.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return False
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return True
    positional = [
        p for p in parameters if p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    return len(positional) > 1 and (
        positional[1].default is positional[1].empty
        or positional[1].name in CONTEXT_NAMES
        or _is_context(positional[1])
    )


def _target(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _docstring_of(function: Callable[..., Any]) -> str | None:
    inner = _target(function)
    if inspect.isroutine(inner):
        return inspect.getdoc(inner)
    return inspect.getdoc(type(inner).__call__) if _own_call(inner) else inspect.getdoc(inner)


def _own_call(value: Any) -> bool:
    return "__call__" in type(value).__dict__ and bool(type(value).__call__.__doc__)


def _parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    """Return the parameters with their annotations evaluated."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError) as error:
        raise TypeError(
            f"tool '{name}': the signature cannot be read ({error}). Wrap it in a function with annotated parameters."
        ) from error
    hints = _hints(function, name, signature)
    parameters = [
        parameter.replace(annotation=hints.get(parameter.name, parameter.annotation))
        for parameter in signature.parameters.values()
    ]
    for position, parameter in enumerate(parameters):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            raise TypeError(
                f"tool '{name}': parameter '*{parameter.name}': models pass arguments by name. Use a list parameter."
            )
        if position == 0 and parameter.name in ("self", "cls") and parameter.annotation is parameter.empty:
            sentence = "shows an unbound method. Use the bound method: as_tool(instance.method)."
            raise TypeError(f"tool '{name}': parameter '{parameter.name}' {sentence}")
    return parameters


def _check_docstring(name: str, docstring: Docstring, parameters: list[inspect.Parameter]) -> None:
    """Raise TypeError if the docstring describes parameters that the function does not have: the model would read
    nothing about the real one.
    """
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    # A capital letter begins prose, such as `Note: ...`.
    unknown = [entry for entry in docstring.parameters if entry not in known and not entry[0].isupper()]
    if unknown:
        raise TypeError(
            f"tool '{name}': the docstring describes {', '.join(unknown)}, and the function has "
            f"{', '.join(known) or 'no parameter'}. Correct the names."
        )


def _hints(function: Callable[..., Any], name: str, signature: inspect.Signature) -> dict[str, Any]:
    inner = _target(function)
    source = inner if inspect.isroutine(inner) or inspect.isclass(inner) else type(inner).__call__
    try:
        return typing.get_type_hints(source, include_extras=True)
    except NameError as error:
        affected = [p.name for p in signature.parameters.values() if str(error.name) in _annotation_text(p.annotation)]
        location = f"parameter '{affected[0]}'" if affected else "an annotation"
        sentence = (
            f"{location} names '{error.name}', which the module does not define. Import it at run time, not only for "
            "type checkers."
        )
        raise TypeError(f"tool '{name}': {sentence}") from error
    except TypeError as error:
        raise TypeError(f"tool '{name}': the annotations cannot be read ({error}). Fix them.") from error


def _annotation_text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else repr(annotation)


def _is_context(parameter: inspect.Parameter) -> bool:
    if parameter.annotation is parameter.empty:
        return parameter.name in CONTEXT_NAMES and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    annotation = parameter.annotation
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if isinstance(annotation, str):
        return CallContext.__name__ in annotation
    return annotation is CallContext or CallContext in get_args(annotation)


def _field(parameter: inspect.Parameter, docstring: Docstring) -> tuple[Any, Any]:
    annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
    facts: dict[str, Any] = {"alias": parameter.name}
    if isinstance(parameter.default, FieldInfo):
        annotation = Annotated[annotation, parameter.default]
    elif isinstance(parameter.default, float) and not math.isfinite(parameter.default):
        # The schema leaves out the value of a factory: JSON has no infinite number and no NaN.
        facts["default_factory"] = lambda: parameter.default
    elif parameter.default is not parameter.empty:
        facts["default"] = parameter.default
    description = docstring.parameters.get(parameter.name)
    if description and not _has_description(annotation):
        facts["description"] = description
    return annotation, Field(**facts)


def _has_description(annotation: Any) -> bool:
    return get_origin(annotation) is Annotated and any(
        isinstance(fact, FieldInfo) and fact.description for fact in get_args(annotation)[1:]
    )


def _extra_adapter(parameter: inspect.Parameter, name: str) -> TypeAdapter[dict[str, Any]]:
    annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
    try:
        return TypeAdapter(dict[str, annotation])  # type: ignore[valid-type]
    except _UNFIT as error:
        raise _unfit(name, f"**{parameter.name}", annotation, error) from error


def _build_model(name: str, fields: dict[str, Any]) -> type[BaseModel]:
    try:
        model: type[BaseModel] = create_model(name, __config__=ConfigDict(protected_namespaces=()), **fields)
        _model_schema(model)
    except _UNFIT as error:
        for annotation, info in fields.values():
            _check_annotation(name, str(info.alias), annotation)
        raise TypeError(
            f"tool '{name}': the parameters have no JSON Schema ({_first_line(error)}). Annotate them with JSON types."
        ) from error
    return model


def _check_annotation(name: str, parameter: str, annotation: Any) -> None:
    try:
        TypeAdapter(annotation).json_schema()
    except _UNFIT as error:
        raise _unfit(name, parameter, annotation, error) from error


def _unfit(name: str, parameter: str, annotation: Any, error: Exception) -> TypeError:
    shown = (
        annotation.__forward_arg__
        if isinstance(annotation, ForwardRef)
        else getattr(annotation, "__name__", None) or str(annotation)
    )
    sentence = f"parameter '{parameter}': {shown} has no JSON form ({_first_line(error)})"
    return TypeError(f"tool '{name}': {sentence}. Annotate it with JSON types, a pydantic model, or CallContext.")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _model_schema(model: type[BaseModel]) -> JsonSchema:
    with warnings.catch_warnings():
        # A default without a JSON form is left out of the schema. The parameter is still optional.
        warnings.simplefilter("ignore", PydanticJsonSchemaWarning)
        return model.model_json_schema()


def _schema(model: type[BaseModel], extra: TypeAdapter[dict[str, Any]] | None) -> JsonSchema:
    schema = plain_schema(_model_schema(model))
    schema.setdefault("properties", {})
    schema.pop("description", None)
    if extra is not None:
        schema["additionalProperties"] = plain_schema(extra.json_schema()).get("additionalProperties", True)
    return schema


def _describe_errors(error: ValidationError) -> str:
    parts = explain_errors(error.errors(include_url=False))[:5]
    return "; ".join(f"parameter '{format_path(part.path)}': {part.reason}" for part in parts)
