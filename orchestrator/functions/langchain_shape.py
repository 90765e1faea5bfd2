"""Objects that have the attributes of LangChain tools: detection, parameters and handlers.

Objects are recognized by their attributes, never by their class, so that LangChain is not a dependency.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from pydantic import BaseModel

from toolcrew.contract.functions.call_context import CallContext, CallHandler, FunctionHandler
from toolcrew.contract.functions.call_handlers import build_execute_handler, build_function_handler
from toolcrew.contract.functions.function_schemas import is_async, read_function, tool_parameters
from toolcrew.contract.functions.json_schemas import JsonSchema, plain_schema

SINGLE_ARGUMENT = "__arg1"
"""Name of the only parameter, a string, of a tool without a schema."""

CALL_ID = "tool_call_id"
"""Name of the only injected parameter that every caller can supply: the id of the tool call."""

_SCHEMAS = ("tool_call_schema", "args_schema", "get_input_schema")
_RUNNERS = ("ainvoke", "invoke", "_run")


def is_langchain_shaped(value: Any) -> bool:
    """Return whether `value` has a name, a description, a schema attribute (its value may be None) and a method to
    run.
    """
    if isinstance(value, type | Mapping) or not _has_name(value):
        return False
    return any(hasattr(value, name) for name in _SCHEMAS) and any(
        callable(getattr(value, name, None)) for name in _RUNNERS
    )


def is_base_tool(value: Any) -> bool:
    """Return whether `value` has a name, a description and `_run` or `run`, so that the signature can be its schema."""
    if isinstance(value, type | Mapping) or not _has_name(value):
        return False
    return any(callable(getattr(value, name, None)) for name in ("_run", "run"))


def langchain_schema(value: Any) -> JsonSchema:
    """Return the parameters of `value`: from its schema, otherwise from `_run`, otherwise one string named `__arg1`."""
    if not _is_single_input(value):
        for name in _SCHEMAS:
            schema = getattr(value, name, None)
            if name == "get_input_schema" and callable(schema):
                schema = schema()
            if schema is not None:
                return schema_of(schema)
        signature = _signature_schema(value)
        if signature is not None:
            return signature
    return {
        "type": "object",
        "properties": {SINGLE_ARGUMENT: {"type": "string"}},
        "required": [SINGLE_ARGUMENT],
    }


def base_tool_schema(value: Any) -> JsonSchema:
    """Return the parameters of a tool without a schema, from `parameters` or from the signature of `_run` or `run`."""
    own = getattr(value, "parameters", None)
    return schema_of(own) if own is not None else tool_parameters(read_function(_runner(value), name=value.name))


def schema_of(source: Any) -> JsonSchema:
    """Return the JSON Schema of an object without title and description.

    `source` is a pydantic class (version 1 or 2) or a mapping. Raises TypeError for any other value.
    """
    if isinstance(source, Mapping):
        schema = dict(source)
    elif isinstance(source, type) and issubclass(source, BaseModel):
        schema = plain_schema(source.model_json_schema())
    elif isinstance(source, type) and callable(getattr(source, "schema", None)):
        schema = plain_schema(source.schema())  # type: ignore[attr-defined]
    else:
        raise TypeError(f"{source!r} is not a schema: pass a pydantic class or a JSON Schema")
    schema = {key: value for key, value in schema.items() if key not in ("title", "description")}
    return {"type": "object", "properties": {}, **schema}


def build_langchain_handler(value: Any, schema: JsonSchema) -> CallHandler:
    """Build a handler that calls `ainvoke(args)`, otherwise `invoke(args)`, otherwise `_run(**args)`.

    Methods that are not async run in a thread. `schema`: the result of `langchain_schema(value)`.
    """
    for name in ("ainvoke", "invoke"):
        if callable(getattr(value, name, None)):
            invoke = getattr(value, name)
            return (
                _build_call_handler(value, invoke)
                if _needs_call(value)
                else build_execute_handler(invoke, is_alone=True)
            )
    run = _runner(value)
    if SINGLE_ARGUMENT in schema.get("properties", {}):
        # Pass the argument by position, because the method has no parameter named `__arg1`.
        return FunctionHandler(lambda arguments, _: run(*arguments.values()), is_async(run))
    if any(getattr(value, name, None) is not None for name in _SCHEMAS):
        return FunctionHandler(lambda arguments, _: run(**arguments), is_async(run))
    return build_function_handler(run, value.name)


def check_injected(value: Any) -> None:
    """Raise TypeError when only the tool's own framework can supply one of its required parameters."""
    missing = [name for name, is_required in _hidden_fields(value).items() if is_required and name != CALL_ID]
    if missing:
        raise TypeError(
            f"tool '{value.name}': only LangChain or LangGraph can supply the parameter '{missing[0]}': give the "
            "parameter a default, or wrap the tool in a function without the parameter"
        )


def build_base_tool_handler(value: Any) -> CallHandler:
    """Build a handler that calls `_run(**args)`, otherwise `run(**args)`. A parameter annotated CallContext gets the
    context.
    """
    run = _runner(value)
    if getattr(value, "parameters", None) is not None:
        return FunctionHandler(lambda arguments, _: run(**arguments), is_async(run))
    return build_function_handler(run, value.name)


def _build_call_handler(value: Any, invoke: Callable[..., Any]) -> CallHandler:
    """Build a handler that passes a tool call, so that the tool returns a ToolMessage with status and artifact."""

    def run(arguments: dict[str, Any], context: CallContext) -> Any:
        return invoke({"type": "tool_call", "id": context.call_id, "name": value.name, "args": arguments})

    return FunctionHandler(run, is_async(invoke))


def _needs_call(value: Any) -> bool:
    """Return whether the tool needs a tool call instead of bare arguments.

    This is true when the tool requires the call id, or returns an artifact that would otherwise be lost. It is also
    true when the tool handles its own errors, because such a failure would otherwise count as success.
    """
    if getattr(value, "response_format", None) == "content_and_artifact":
        return True
    if any(getattr(value, name, None) for name in ("handle_tool_error", "handle_validation_error")):
        return True
    injected = getattr(value, "_injected_args_keys", ())
    return CALL_ID in _hidden_fields(value) or (isinstance(injected, frozenset) and CALL_ID in injected)


def _hidden_fields(value: Any) -> dict[str, bool]:
    """Return the parameters that the tool accepts but does not show to models, with whether each is required."""
    visible_schema, get_input_schema = (
        getattr(value, "tool_call_schema", None),
        getattr(value, "get_input_schema", None),
    )
    if (
        isinstance(getattr(value, "args_schema", None), Mapping)
        or not _has_fields(visible_schema)
        or not callable(get_input_schema)
    ):
        return {}
    input_schema = get_input_schema()
    fields = input_schema.model_fields if _has_fields(input_schema) else {}
    return {name: field.is_required() for name, field in fields.items() if name not in visible_schema.model_fields}


def _has_fields(schema: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(schema, type) and issubclass(schema, BaseModel)


def _has_name(value: Any) -> bool:
    return isinstance(getattr(value, "name", None), str) and isinstance(getattr(value, "description", None), str)


def _is_single_input(value: Any) -> bool:
    """Return whether `value` is LangChain's old `Tool`, which accepts one string.

    Its computed schema describes only its internals. The attribute `args` identifies it.
    """
    if getattr(value, "args_schema", None) is not None:
        return False
    declared = getattr(value, "args", None)
    return isinstance(declared, Mapping) and set(declared) == {"tool_input"}


def _runner(value: Any) -> Callable[..., Any]:
    run: Callable[..., Any] = value._run if callable(getattr(value, "_run", None)) else value.run
    return run


def _signature_schema(value: Any) -> JsonSchema | None:
    """Return the parameters of an annotated `_run`, or None when the signature gives no information."""
    run = getattr(value, "_run", None)
    if not callable(run):
        return None
    parameters = inspect.signature(run).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) or not any(p.annotation is not p.empty for p in parameters):
        return None
    return tool_parameters(read_function(run, name=value.name))
