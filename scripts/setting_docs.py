#!/usr/bin/env python3
"""Writes docs/settings.md from the settings classes: every variable with its type, default and meaning.

    .venv/bin/python scripts/setting_docs.py [--check]

With --check nothing is written: exit status 1 when the page is not what the classes say.
"""

import ast
import inspect
import json
import re
import sys
import types
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pydantic import BaseModel  # noqa: E402
from pydantic.fields import FieldInfo  # noqa: E402

from contract.setting_rows import variable_names  # noqa: E402
from orchestrator.settings import OrchestratorSettings  # noqa: E402
from scripts.kept_pages import keep_page  # noqa: E402
from telemetry.settings import TracingSettings  # noqa: E402
from workers.settings import (  # noqa: E402
    EgressSettings,
    SandboxdSettings,
    TenantClass,
    WebSettings,
    WorkerSettings,
)

PAGE = ROOT / "docs" / "settings.md"
INTRO = """\
# Settings

Made from the settings classes by `scripts/setting_docs.py`. Each process reads its own from the environment, once, when it starts; `toolcrew config show --origin` prints
them all with their values here. Lists and objects are written as JSON; a variable that is empty counts as not set; a value that cannot be read
ends the process with the variable's name. A variable that begins with `TOOLCREW_` and that no process reads is an error in every process, with the
nearest known name. Secrets are never printed.
"""
PROCESSES: tuple[tuple[str, str, type[BaseModel]], ...] = (
    (
        "The orchestrator",
        "`toolcrew`, the SDK, `toolcrew serve api`, `toolcrew serve batches`, Flower.",
        OrchestratorSettings,
    ),
    (
        "Tracing",
        "Of every process. The other variables of OpenTelemetry's exporter are its own ([tracing.md](tracing.md)).",
        TracingSettings,
    ),
    ("Workers", "`toolcrew serve worker`, of both kinds.", WorkerSettings),
    (
        "sandboxd",
        "`python -m workers.sandboxd`; more of each in [operations-sandboxes.md](operations-sandboxes.md).",
        SandboxdSettings,
    ),
    ("Web tools", "Read by workers of the kind web.", WebSettings),
    ("The egress proxy", "`python -m workers.egress` ([egress.md](egress.md)).", EgressSettings),
)
# Defaults that are made on the host, in words.
MADE = {
    "host": "this host's name",
    "concurrency": "16; 4 in processes",
    "traces": "`toolcrew/traces` in the user's state folder",
    "sandboxd_socket": "`sandboxd.sock` in the user's runtime folder",
    "egress_socket": "`egress.sock` beside it",
    "sandboxd_leases": "`/run/toolcrew/leases` for root, else beside the socket",
}
# Meanings that go without saying beside the class, and not on a page of their own.
PLAIN = {
    "redis_url": ("The pool's Redis: `redis://user:password@host:port/db`, `rediss://` for TLS, `sentinel://` for sentinels "
"([wire-security.md](wire-security.md))."),
    "deployment": "The name that all processes of one deployment share; it is in every key.",
    "secret": ("What calls, results and orders are signed with, the same on both sides; without it Redis's password "
"([wire-security.md](wire-security.md))."),
    "redis_sentinel_password": "The sentinels' own password.",
    "model": ("The model's name at `OPENAI_BASE_URL`. `local` and `scripted` are models that are shipped with toolcrew; they "
"are refused while `OPENAI_BASE_URL` is set."),
    "dialect": "How the model asks for tools; `auto`: what it can do ([dialects.md](dialects.md)).",
    "approvals": "What becomes of calls that need approval ([approvals.md](approvals.md)).",
    "model_file": "Weights of the local model, instead of those that are loaded ([local-model.md](local-model.md)).",
    "model_timeout_s": "How long a reply may take to begin, and then between its parts.",
    "openai_base_url": "The endpoint of the model.",
    "openai_api_key": "Its key.",
    "log_level": "What is logged from here on.",
    "protocol": "Only `http/protobuf` is spoken.",
    "is_disabled": "True turns tracing off, whatever else is set.",
    "sandboxd_socket": "Where sandboxd listens.",
    "sandboxd_allow_uids": "Who may connect beside sandboxd's own uid.",
    "sandbox_image": "The image of the default class.",
    "sandbox_images_allowed": "Others that sessions may ask for.",
    "sandbox_runtime": "The engine's runtime of the default class; `runsc` is gVisor.",
    "sandbox_memory_reserve_bytes": "Memory of a sandbox.",
    "sandbox_workspace_bytes": "Size of a workspace.",
    "sandbox_cpus": "Processors of a sandbox.",
    "sandbox_pids": "Processes of a sandbox.",
    "max_sessions": "Open sessions at a time.",
    "refuse_ranges": "Networks that web tools and sandboxes must not reach, beside the private ones.",
    "nat64_prefix": "The /96 behind which a host without IPv4 finds IPv4.",
    "searxng_url": "A SearXNG of one's own.",
    "tavily_api_key": "Turns Tavily on.",
    "brave_api_key": "Turns Brave on.",
    "exa_api_key": "Turns Exa on.",
    "egress_socket": "Where the proxy listens.",
}  # fmt: skip


def build_page() -> str:
    """The whole page. Raises SystemExit for a setting that says nowhere what it means."""
    parts = [INTRO]
    for title, about, settings in PROCESSES:
        parts.append(
            f"\n## {title}\n\n{about}\n\n| variable | type | default | means |\n|---|---|---|---|\n{_rows(settings)}"
        )
    fields = ", ".join(f"`{name}`" for name in TenantClass.model_fields)
    parts.append(
        f"\nAn object of `TOOLCREW_TENANT_CLASSES` has {fields}; what each does: "
        "[operations-sandboxes.md](operations-sandboxes.md#tenant-classes).\n"
    )
    return "".join(parts)


def _rows(settings: type[BaseModel]) -> str:
    documented = docstrings(settings)
    rows = []
    for name, field in settings.model_fields.items():
        means = documented.get(name) or PLAIN.get(name)
        if means is None:
            raise SystemExit(f"{settings.__name__}.{name} says nowhere what it means: write a docstring below it")
        names = " or ".join(f"`{one}`" for one in variable_names(name, field))
        rows.append(f"| {names} | {_type_of(field)} | {_default_of(name, field)} | {_cell(means)} |\n")
    return "".join(rows)


def docstrings(settings: type[BaseModel]) -> dict[str, str]:
    """The text below each field of the class."""
    (tree,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(settings))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = inspect.cleandoc(str(ast.literal_eval(text.value)))
    return found


def _type_of(field: FieldInfo) -> str:
    text = _name_of(field.annotation)
    bounds = [
        f"{sign} {getattr(one, attr):g}"
        for one in field.metadata
        for attr, sign in _BOUNDS
        if getattr(one, attr, None) is not None
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
    origin, given = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _name_of(given[0])
    if origin is Literal:
        return " / ".join(f"`{one}`" for one in given)
    if origin in (Union, types.UnionType):
        return _name_of(next(one for one in given if one is not type(None)))
    if origin in (list, tuple):
        return f"list of {_name_of(given[0])}"
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
    """Of a table; pages link to one another as they lie."""
    text = re.sub(r"\((?:docs/)([a-z-]+\.md)\)", r"([\1](\1))", text)
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    return keep_page(PAGE, build_page(), "the settings say")


if __name__ == "__main__":
    sys.exit(main())
