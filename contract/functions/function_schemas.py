"""A Python signature as a tool's parameters: the JSON Schema a model reads, and how its arguments become the
function's.
"""

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

from contract.errors import ErrorCode, ToolFailure
from contract.functions.call_context import CallContext, KnownHandler
from contract.functions.docstrings import Docstring, parse_docstring
from contract.functions.json_schemas import JsonSchema, plain_schema

CONTEXT_NAMES = frozenset({"context", "ctx"})
"""A parameter of this name without annotation gets the context, as one annotated CallContext does whatever its name."""

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
    """What is known of a function without calling it."""

    name: str
    docstring: Docstring
    schema: JsonSchema
    """As pydantic makes it, references inlined, titles dropped."""
    _model: type[BaseModel]
    _fields: Mapping[str, str]
    """Parameter -> field of the model. The fields have names of their own: a parameter may be called `schema` or
    `_x`.
    """
    _positional: tuple[str, ...] = ()
    _context: frozenset[str] = frozenset()
    _extra: TypeAdapter[dict[str, Any]] | None = field(default=None)

    @property
    def is_open(self) -> bool:
        """True when the function takes any further named argument."""
        return self._extra is not None

    def bind(self, arguments: Mapping[str, Any], context: CallContext) -> tuple[list[Any], dict[str, Any]]:
        """Arguments as the function's own types. Raises ToolFailure(INVALID_ARGUMENTS) with what does not fit."""
        try:
            checked = self._model.model_validate(
                {name: value for name, value in arguments.items() if name in self._fields}
            )
            extra = {name: value for name, value in arguments.items() if name not in self._fields}
            named = {name: getattr(checked, place) for name, place in self._fields.items()}
            if self._extra is not None:
                named.update(self._extra.validate_python(extra))
            elif extra:
                raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{self.name}: unknown parameter '{next(iter(extra))}'")
        except ValidationError as error:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{self.name}: {_complaints(error)}") from error
        named.update(dict.fromkeys(self._context, context))
        return [named.pop(name) for name in self._positional], named


def read_function(function: Callable[..., Any], *, name: str | None = None) -> FunctionShape:
    """The shape of `function`. Raises TypeError, naming function and parameter, for what no model can fill in."""
    name = name or function_name(function)
    docstring = parse_docstring(_docstring_of(function))
    parameters = _parameters(function, name)
    context = frozenset(parameter.name for parameter in parameters if _is_context(parameter))
    extra = None
    fields: dict[str, Any] = {}
    places: dict[str, str] = {}
    for parameter in parameters:
        if parameter.name in context:
            continue
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            extra = _extra_adapter(parameter, name)
            continue
        places[parameter.name] = f"p{len(places)}"
        fields[places[parameter.name]] = _field(parameter, docstring)
    model = _build_model(name, parameters, fields)
    return FunctionShape(
        name=name,
        docstring=docstring,
        schema=_schema(model, extra),
        _model=model,
        _fields=places,
        _positional=tuple(
            parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.POSITIONAL_ONLY
        ),
        _context=context,
        _extra=extra,
    )


def tool_parameters(shape: FunctionShape) -> JsonSchema:
    """The parameters of a ToolSpec: closed to unknown names unless the function is open, null told as a type."""
    plain = plain_schema(shape.schema, tell_null_as_type=True)
    return plain if shape.is_open else {**plain, "additionalProperties": False}


def function_name(function: Callable[..., Any]) -> str:
    """The name a function goes by, also through `functools.partial` and for callable objects."""
    inner = _target(function)
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def is_async(function: Callable[..., Any]) -> bool:
    """True when calling it gives a coroutine: `async def`, also as a method, in a partial, or as an object's
    `__call__`.
    """
    inner = _target(function)
    if isinstance(inner, KnownHandler):
        return inner.gives_coroutine
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def takes_second_argument(function: Callable[..., Any]) -> bool:
    """Whether a context is to be passed behind the arguments. False when the signature cannot be read, and for a second
    parameter with a default that says nothing of a context: that is the function's own."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return False
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return True
    places = [
        p for p in parameters if p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    return len(places) > 1 and (
        places[1].default is places[1].empty or places[1].name in CONTEXT_NAMES or _is_context(places[1])
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
    """The parameters with their annotations evaluated."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError) as error:
        raise TypeError(
            f"tool '{name}': its signature cannot be read ({error}): wrap it in a function with annotated parameters"
        ) from error
    hints = _hints(function, name, signature)
    found = [
        parameter.replace(annotation=hints.get(parameter.name, parameter.annotation))
        for parameter in signature.parameters.values()
    ]
    for place, parameter in enumerate(found):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            raise TypeError(
                f"tool '{name}': parameter '*{parameter.name}': a model names its arguments: take a list instead"
            )
        if place == 0 and parameter.name in ("self", "cls") and parameter.annotation is parameter.empty:
            sentence = "is a method's own object: make a tool of the bound method, as_tool(instance.method)"
            raise TypeError(f"tool '{name}': parameter '{parameter.name}' {sentence}")
    return found


def _hints(function: Callable[..., Any], name: str, signature: inspect.Signature) -> dict[str, Any]:
    inner = _target(function)
    source = inner if inspect.isroutine(inner) or inspect.isclass(inner) else type(inner).__call__
    try:
        return typing.get_type_hints(source, include_extras=True)
    except NameError as error:
        guilty = [p.name for p in signature.parameters.values() if str(error.name) in _annotation_text(p.annotation)]
        where = f"parameter '{guilty[0]}'" if guilty else "an annotation"
        sentence = (
            f"{where} names '{error.name}', which its module does not define: import it there, not only for type "
            "checkers"
        )
        raise TypeError(f"tool '{name}': {sentence}") from error
    except TypeError as error:
        raise TypeError(f"tool '{name}': its annotations cannot be read ({error})") from error


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
        # A factory's value is not told: JSON has no such number.
        facts["default_factory"] = lambda: parameter.default
    elif parameter.default is not parameter.empty:
        facts["default"] = parameter.default
    told = docstring.parameters.get(parameter.name)
    if told and not _has_description(annotation):
        facts["description"] = told
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


def _build_model(name: str, parameters: list[inspect.Parameter], fields: dict[str, Any]) -> type[BaseModel]:
    try:
        model: type[BaseModel] = create_model(name, __config__=ConfigDict(protected_namespaces=()), **fields)
        _model_schema(model)
    except _UNFIT as error:
        for annotation, info in fields.values():
            _check_annotation(name, str(info.alias), annotation)
        raise TypeError(
            f"tool '{name}': no JSON Schema can be made of its parameters ({_first_line(error)})"
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
    sentence = f"parameter '{parameter}': {shown} has no JSON form a model could write ({_first_line(error)})"
    return TypeError(f"tool '{name}': {sentence}; annotate it with JSON types, a pydantic model, or CallContext")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _model_schema(model: type[BaseModel]) -> JsonSchema:
    with warnings.catch_warnings():
        # A default that is no JSON stays the function's own business: the parameter is optional, its default untold.
        warnings.simplefilter("ignore", PydanticJsonSchemaWarning)
        return model.model_json_schema()


def _schema(model: type[BaseModel], extra: TypeAdapter[dict[str, Any]] | None) -> JsonSchema:
    schema = plain_schema(_model_schema(model))
    schema.setdefault("properties", {})
    schema.pop("description", None)
    if extra is not None:
        schema["additionalProperties"] = plain_schema(extra.json_schema()).get("additionalProperties", True)
    return schema


def _complaints(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False, include_context=False)[:5]
    return "; ".join(
        f"parameter '{'.'.join(str(part) for part in complaint['loc'])}': {complaint['msg']}" for complaint in found
    )
