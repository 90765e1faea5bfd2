"""Build docs/http-api.md from the OpenAPI description of the API: every path with its parameters and responses."""

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import asynccontextmanager
from typing import Any

from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.api.api_state import ApiState
from toolcrew.orchestrator.api.app import build_app
from toolcrew.orchestrator.http.app_state import ConnectedParts

PAGE = "http-api.md"
INTRO = """\
# Addresses of the HTTP API

Made from the API's OpenAPI by `scripts/reference.py`; a running service returns it at `/openapi.json`. [HTTP API](api.md) explains the API with examples.
Its errors: [errors.md](errors.md).
"""
METHODS = ("get", "put", "post", "patch", "delete")


def read_api() -> dict[str, Any]:
    """Return the OpenAPI description of this release."""

    @asynccontextmanager
    async def nothing(_: ConnectedParts) -> Any:
        yield

    async def build() -> dict[str, Any]:
        return dict(build_app(ApiState(OrchestratorSettings.model_construct()), nothing).openapi())

    return asyncio.run(build())


def build_page() -> str:
    """Return the text of the page."""
    api = read_api()
    groups: dict[str, list[str]] = {}
    for path, methods in api["paths"].items():
        for method in METHODS:
            if method in methods:
                operation = methods[method]
                groups.setdefault((operation.get("tags") or ["others"])[0], []).append(
                    _operation(path, method, operation)
                )
    shapes = "".join(_shape(name, schema) for name, schema in sorted(api["components"]["schemas"].items()))
    parts = "".join(f"\n## Requests: {group}\n{''.join(texts)}" for group, texts in groups.items())
    return f"{INTRO}{parts}\n## Shapes\n{shapes}"


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    lines = [f"\n### {method.upper()} {path}\n\n{_text(operation.get('description') or operation.get('summary'))}\n"]
    rows = [
        (
            f"| `{parameter['name']}` | {parameter['in']} | "
            f"{_type(parameter.get('schema', {}))}{', required' if parameter.get('required') else ''} | "
            f"{_cell(parameter.get('description'))} |\n"
        )
        for parameter in operation.get("parameters", [])
    ]
    if rows:
        lines.append("\n| parameter | in | type | means |\n|---|---|---|---|\n" + "".join(rows))
    body = operation.get("requestBody", {}).get("content", {})
    if body:
        lines.append(
            "\nBody: "
            + ", ".join(f"`{kind}` {_type(content.get('schema', {}))}".rstrip() for kind, content in body.items())
            + ".\n"
        )
    answers = [
        " ".join(
            [status, *(_type(kind["schema"]) for kind in response.get("content", {}).values() if "schema" in kind)]
        )
        for status, response in operation["responses"].items()
        if status.startswith("2")
    ]
    lines.append(f"\nResponses: {', '.join(answers)}.\n")
    return "".join(lines)


def _shape(name: str, schema: Mapping[str, Any]) -> str:
    text = f"\n### {name}\n\n{_text(schema.get('description'))}\n"
    needed = set(schema.get("required", ()))
    rows = [
        f"| `{field}` | {_type(field_schema)}{', required' if field in needed else ''} | {_cell(field_schema.get('description'))} |\n"
        for field, field_schema in schema.get("properties", {}).items()
    ]
    if rows:
        return text + "\n| field | type | means |\n|---|---|---|\n" + "".join(rows)
    return text + (f"\n{_type(schema)}\n")


def _type(schema: Mapping[str, Any]) -> str:
    """Return a short description of the type of a schema. Named schemas are links."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return f"[{name}](#{re.sub(r'[^a-z0-9_-]', '', name.lower())})"
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema:
            return (
                " or ".join(dict.fromkeys(_type(choice) for choice in schema[keyword] if choice.get("type") != "null"))
                or "null"
            )
    if "enum" in schema or "const" in schema:
        return " / ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return (
        "bytes"
        if schema.get("format") == "binary"
        else (kind if isinstance(kind, str) else " or ".join(kind)) + _bounds(schema)
    )


def _bounds(schema: Mapping[str, Any]) -> str:
    formats = {
        "minimum": "≥ {}",
        "maximum": "≤ {}",
        "exclusiveMinimum": "> {}",
        "maxLength": "at most {} characters",
        "maxItems": "at most {}",
    }
    bounds = [text.format(json.dumps(schema[name])) for name, text in formats.items() if name in schema]
    return f" ({', '.join(bounds)})" if bounds else ""


def _text(text: object) -> str:
    """Return a docstring as Markdown. Its `names` are already code; its links are removed, because their targets do
    not exist here.
    """
    return str(text or "").strip().replace("[", "\\[").replace("<", "\\<")


def _cell(text: object) -> str:
    return _text(text).replace("|", "\\|").replace("\n", " ")
