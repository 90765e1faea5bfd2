"""Build docs/settings.md from the settings classes: every variable with its type, default and meaning."""

import ast
import inspect
import json
import re
import types
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from toolcrew.contract.settings import (
    ClientSettings,
    EgressSettings,
    LogSettings,
    OrchestratorSettings,
    SandboxdSettings,
    SharedSettings,
    StreamGatewaySettings,
    TracingSettings,
    WebSettings,
    WorkerSettings,
    variable_names,
)
from toolcrew.contract.tenant_classes import TenantClass

PAGE = "settings.md"
INTRO = """\
# Settings

Each process reads its settings from the environment once, when it starts. `toolcrew config show --origin` prints all of them with the values on this
host. Write lists and objects as JSON. An empty variable counts as not set. A wrong value, or a variable that begins with `TOOLCREW_` and is no
setting, ends the process with the nearest known name. Secrets are never printed.

An *operator* runs the deployment, a *batch team* runs agents on it, a *tenant* uses it with an API key. `scripts/reference.py` writes this page
from the settings classes.
"""
PROCESSES: tuple[tuple[str, str, type[BaseModel]], ...] = (
    (
        "Redis and signatures",
        "Read by orchestrators and workers. Workers must have a `TOOLCREW_REDIS_URL`.",
        SharedSettings,
    ),
    ("Logs", "Read by every service. Commands and the SDK leave logging to their caller.", LogSettings),
    (
        "Tracing",
        "Read by orchestrators and workers. OpenTelemetry reads more variables itself ([Observe](observe.md#opentelemetry)).",
        TracingSettings,
    ),
    (
        "Clients",
        "Read by `toolcrew.Client`, and like those of orchestrators by `toolcrew` and the SDK.",
        ClientSettings,
    ),
    (
        "Orchestrators",
        "Read by `toolcrew`, the SDK, `toolcrew serve api`, `toolcrew serve batches` and Flower.",
        OrchestratorSettings,
    ),
    ("Workers", "Read by `toolcrew serve worker` of both kinds.", WorkerSettings),
    (
        "Stream gateway",
        "Read by `python -m toolcrew.workers.stream_gateway` ([Stream protocol](stream-protocol.md)).",
        StreamGatewaySettings,
    ),
    (
        "sandboxd",
        "Read by `python -m toolcrew.workers.sandboxd` ([Sandboxes and images](images.md)).",
        SandboxdSettings,
    ),
    ("Web tools", "Read by workers of the kind web.", WebSettings),
    (
        "Egress proxy",
        "Read by `python -m toolcrew.workers.egress` ([Sandboxes and images](images.md#how-does-a-sandbox-reach-the-network)).",
        EgressSettings,
    ),
)
# Defaults that depend on the host.
MADE = {
    "host": "this host's name",
    "concurrency": "16; 4 for `web`",
    "traces": "`toolcrew/traces` in the user's state folder",
    "sandboxd_socket": "`sandboxd.sock` in the user's runtime folder",
    "egress_socket": "`egress.sock` in the user's runtime folder",
    "sandboxd_leases": "`/run/toolcrew/leases` for root, else next to the socket",
}


def build_page() -> str:
    """Return the whole page. Raises SystemExit for a setting without a description."""
    parts = [INTRO]
    for title, about, settings in PROCESSES:
        parts.append(
            f"\n## {title}\n\n{about}\n\n| variable | type | default | means |\n|---|---|---|---|\n{_rows(settings)}"
        )
    fields = ", ".join(f"`{name}`" for name in TenantClass.model_fields)
    parts.append(f"\nA class in `TOOLCREW_TENANT_CLASSES` may have {fields} ([Sandboxes and images](images.md)).\n")
    return "".join(parts)


def _rows(settings: type[BaseModel]) -> str:
    rows = []
    for name, meaning in docstrings(settings).items():
        field = settings.model_fields[name]
        names = " or ".join(f"`{variable}`" for variable in variable_names(name, field))
        rows.append(f"| {names} | {_type_of(field)} | {_default_of(name, field)} | {_cell(meaning)} |\n")
    return "".join(rows)


def docstrings(settings: type[BaseModel]) -> dict[str, str]:
    """Return the docstring of each field that the class itself declares.

    Raises SystemExit when a field has no docstring and no base class has one.
    """
    (tree,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(settings))).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            texts[field.target.id] = inspect.cleandoc(str(ast.literal_eval(text.value)))
    inherited = {name for base in settings.__bases__ for name in getattr(base, "model_fields", {})}
    if missing := settings.model_fields.keys() - texts.keys() - inherited:
        raise SystemExit(f"{settings.__name__}: write a description below each of {', '.join(sorted(missing))}")
    return texts


def _type_of(field: FieldInfo) -> str:
    text = _name_of(field.annotation)
    bounds = [
        f"{sign} {getattr(constraint, attr):.12g}"
        for constraint in field.metadata
        for attr, sign in _BOUNDS
        if getattr(constraint, attr, None) is not None
    ]
    return text + (f", {' and '.join(bounds)}" if bounds else "")


_BOUNDS = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
_NAMES = {
    "str": "text",
    "int": "number",
    "float": "number",
    "bool": "true or false",
    "SecretStr": "secret",
    "Path": "path",
}


def _name_of(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _name_of(arguments[0])
    if origin is Literal:
        return " / ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return _name_of(next(argument for argument in arguments if argument is not type(None)))
    if origin in (list, tuple):
        return f"list of {_name_of(arguments[0])}"
    if origin is dict:
        return "object"
    name = getattr(kind, "__name__", str(kind))
    return _NAMES.get(name, "network" if "IP" in name or "ip" in name else name)


def _default_of(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "must be set"
    if field.default_factory is not None:
        return MADE[name]
    value = field.default
    if value is None or value in ([], {}):
        return "none"
    if name.endswith("_mode"):
        return f"`{value:04o}`"
    if isinstance(value, bool | list):
        return f"`{json.dumps(value)}`"
    return (
        f"`{value:g}`"
        if isinstance(value, float)
        else f"`{value}`"
        if isinstance(value, str | int | PurePath)
        else _cell(str(value))
    )


def _cell(text: str) -> str:
    """Return the text for a cell of a table, with links to other pages."""
    text = re.sub(r"\((?:docs/)([a-z-]+\.md)\)", r"([\1](\1))", text)
    return " ".join(text.replace("|", "\\|").split())
