"""Objects in LangChain's shape, known by what they can do and never by their class: their parameters, and how they are
run.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from pydantic import BaseModel

from contract.functions.call_context import CallContext, CallHandler, FunctionHandler
from contract.functions.call_handlers import build_execute_handler, build_function_handler
from contract.functions.function_schemas import is_async, read_function, tool_parameters
from contract.functions.json_schemas import JsonSchema, plain_schema

SINGLE_ARGUMENT = "__arg1"
"""What a tool without a schema calls its one string."""

CALL_ID = "tool_call_id"
"""The one injected parameter that every caller can fill in."""

_SCHEMAS = ("tool_call_schema", "args_schema", "get_input_schema")
_RUNNERS = ("ainvoke", "invoke", "_run")


def is_langchain_shaped(value: Any) -> bool:
    """An instance with name and description, a schema of any kind (it may be None) and a way to run."""
    if isinstance(value, type | Mapping) or not _is_named(value):
        return False
    return any(hasattr(value, name) for name in _SCHEMAS) and any(
        callable(getattr(value, name, None)) for name in _RUNNERS
    )


def is_base_tool(value: Any) -> bool:
    """An instance with name and description and `_run` or `run`, and no schema at all: its signature is the schema."""
    if isinstance(value, type | Mapping) or not _is_named(value):
        return False
    return any(callable(getattr(value, name, None)) for name in ("_run", "run"))


def langchain_schema(value: Any) -> JsonSchema:
    """The parameters that `value` wants: its schema's, else those of its `_run`, else one string called `__arg1`."""
    if not _is_single_input(value):
        for name in _SCHEMAS:
            found = getattr(value, name, None)
            if name == "get_input_schema" and callable(found):
                found = found()
            if found is not None:
                return schema_of(found)
        signature = _signature_schema(value)
        if signature is not None:
            return signature
    return {
        "type": "object",
        "properties": {SINGLE_ARGUMENT: {"type": "string"}},
        "required": [SINGLE_ARGUMENT],
    }


def base_tool_schema(value: Any) -> JsonSchema:
    """The parameters of a tool without a schema, as its `_run` or `run` takes them."""
    own = getattr(value, "parameters", None)
    return schema_of(own) if own is not None else tool_parameters(read_function(_runner(value), name=value.name))


def schema_of(found: Any) -> JsonSchema:
    """A JSON Schema of an object, from a pydantic class (of either version) or a mapping; without title and
    description.
    """
    if isinstance(found, Mapping):
        schema = dict(found)
    elif isinstance(found, type) and issubclass(found, BaseModel):
        schema = plain_schema(found.model_json_schema())
    elif isinstance(found, type) and callable(getattr(found, "schema", None)):
        schema = plain_schema(found.schema())  # type: ignore[attr-defined]
    else:
        raise TypeError(f"{found!r} is no schema: give a pydantic class or a JSON Schema")
    schema = {key: value for key, value in schema.items() if key not in ("title", "description")}
    return {"type": "object", "properties": {}, **schema}


def build_langchain_handler(value: Any, schema: JsonSchema) -> CallHandler:
    """`ainvoke(args)`, else `invoke(args)`, else `_run(**args)`; those that are not async in a thread, as every plain
    function.

    `schema`: what langchain_schema says of `value`.
    """
    for name in ("ainvoke", "invoke"):
        if callable(getattr(value, name, None)):
            invoke = getattr(value, name)
            return (
                _build_call_handler(value, invoke)
                if _wants_call(value)
                else build_execute_handler(invoke, is_alone=True)
            )
    run = _runner(value)
    if SINGLE_ARGUMENT in schema.get("properties", {}):
        # By its place: that name is nobody's.
        return FunctionHandler(lambda arguments, _: run(*arguments.values()), is_async(run))
    if any(getattr(value, name, None) is not None for name in _SCHEMAS):
        return FunctionHandler(lambda arguments, _: run(**arguments), is_async(run))
    return build_function_handler(run, value.name)


def check_injected(value: Any) -> None:
    """Raises TypeError for a tool with a required parameter that only its own framework fills in."""
    missing = [name for name, is_required in _hidden_fields(value).items() if is_required and name != CALL_ID]
    if missing:
        raise TypeError(
            f"tool '{value.name}': its parameter '{missing[0]}' is filled in by LangChain or LangGraph alone: give it "
            "a default, or wrap the tool in a function without it"
        )


def build_base_tool_handler(value: Any) -> CallHandler:
    """`_run(**args)`, else `run(**args)`; a parameter annotated CallContext gets the context."""
    run = _runner(value)
    if getattr(value, "parameters", None) is not None:
        return FunctionHandler(lambda arguments, _: run(**arguments), is_async(run))
    return build_function_handler(run, value.name)


def _build_call_handler(value: Any, invoke: Callable[..., Any]) -> CallHandler:
    """Invokes with a tool call, so that a ToolMessage comes back: with status and artifact."""

    def run(arguments: dict[str, Any], context: CallContext) -> Any:
        return invoke({"type": "tool_call", "id": context.call_id, "name": value.name, "args": arguments})

    return FunctionHandler(run, is_async(invoke))


def _wants_call(value: Any) -> bool:
    """Whether bare arguments are too little: the tool wants the call's id, or what it tells beside its text would be
    lost; a failure that it handles by itself would count as success."""
    if getattr(value, "response_format", None) == "content_and_artifact":
        return True
    if any(getattr(value, name, None) for name in ("handle_tool_error", "handle_validation_error")):
        return True
    injected = getattr(value, "_injected_args_keys", ())
    return CALL_ID in _hidden_fields(value) or (isinstance(injected, frozenset) and CALL_ID in injected)


def _hidden_fields(value: Any) -> dict[str, bool]:
    """Parameters that a tool takes and does not show to models: whether each is required."""
    shown, taken = getattr(value, "tool_call_schema", None), getattr(value, "get_input_schema", None)
    if isinstance(getattr(value, "args_schema", None), Mapping) or not _has_fields(shown) or not callable(taken):
        return {}
    whole = taken()
    fields = whole.model_fields if _has_fields(whole) else {}
    return {name: field.is_required() for name, field in fields.items() if name not in shown.model_fields}


def _has_fields(schema: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(schema, type) and issubclass(schema, BaseModel)


def _is_named(value: Any) -> bool:
    return isinstance(getattr(value, "name", None), str) and isinstance(getattr(value, "description", None), str)


def _is_single_input(value: Any) -> bool:
    """LangChain's old `Tool` computes a schema from its internals, which says nothing; it owns up by `args`."""
    if getattr(value, "args_schema", None) is not None:
        return False
    told = getattr(value, "args", None)
    return isinstance(told, Mapping) and set(told) == {"tool_input"}


def _runner(value: Any) -> Callable[..., Any]:
    run: Callable[..., Any] = value._run if callable(getattr(value, "_run", None)) else value.run
    return run


def _signature_schema(value: Any) -> JsonSchema | None:
    """What an annotated `_run` says; None when there is none that says anything."""
    run = getattr(value, "_run", None)
    if not callable(run):
        return None
    parameters = inspect.signature(run).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) or not any(p.annotation is not p.empty for p in parameters):
        return None
    return tool_parameters(read_function(run, name=value.name))
