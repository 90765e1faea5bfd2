"""The architecture check catches every rule it claims, and this repository keeps them all."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_architecture.py"

CLEAN_TREE = {
    "contract/__init__.py": "",
    "contract/calls.py": "import json\nfrom pydantic import BaseModel",
    "contract/settings.py": "import os\nfrom pydantic_settings import BaseSettings\nHOME = os.environ.get('HOME')",
    "orchestrator/__init__.py": "from toolcrew.orchestrator.loop.agent import step",
    "orchestrator/loop/agent.py": "import asyncio\nfrom toolcrew.contract import calls\nfrom .models import base",
    "store/calls.py": "import redis.asyncio",
    "orchestrator/cli/batch.py": "import typer\nfrom rich.console import Console",
    "orchestrator/command.py": "import typer\nfrom toolcrew.orchestrator.api import service\nfrom toolcrew.orchestrator.cli import batch",
    "orchestrator/http/server.py": "import uvicorn\nfrom starlette.types import ASGIApp",
    "orchestrator/models/__init__.py": "",
    "orchestrator/dialects/model.py": "from toolcrew.contract.calls import BaseModel",
    "orchestrator/models/openai.py": "import openai\nfrom . import base",
    "workers/__init__.py": "",
    "workers/sandboxd/__init__.py": "",
    "workers/sandboxd/runtime/engine.py": "import docker\nfrom .. import tasks",
    "workers/celery_edge/tasks.py": "import celery\nfrom kombu import Queue\nfrom toolcrew.contract.calls import BaseModel",
    "sandbox-images/guest/__init__.py": "",
    "sandbox-images/guest/boot.py": "import os, struct\nfrom guest import frames\nfrom guest.frames import json",
    "sandbox-images/guest/frames.py": "import json",
    "tests/__init__.py": "",
    "scripts/demo": "#!/bin/sh\nexec true",
}


def load_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_architecture", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


CHECK = load_check()


def write_tree(root: Path, files: dict[str, str]) -> None:
    """Every Python file gets the docstring that the check asks for, on a line of its own."""
    for path, source in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        docstring = '"""One duty."""\n' if path.endswith(".py") else ""
        target.write_text(f"{docstring}{source}\n", encoding="utf-8")


def find_violations(root: Path) -> list[tuple[str, int, str]]:
    return [(violation.path, violation.line, violation.rule) for violation in CHECK.check_tree(root)]


def test_a_tree_without_violations_passes(tmp_path: Path) -> None:
    write_tree(tmp_path, CLEAN_TREE)
    assert CHECK.check_tree(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "source", "rule"),
    [
        ("contract/x.py", "import toolcrew.orchestrator.loop.agent", "arrow"),
        ("workers/x.py", "def f():\n    import toolcrew.orchestrator", "arrow"),
        ("workers/x.py", "import importlib as i\ni.import_module('toolcrew.orchestrator.loop.agent')", "arrow"),
        pytest.param("workers/x.py", "import guest", "arrow", id="the host imports the guest"),
        pytest.param("workers/x.py", "from toolcrew import Session", "arrow", id="the public names are for users"),
        pytest.param("workers/x.py", "from store import calls", "bare-name", id="a package by its bare name"),
        pytest.param("tests/x.py", "import contract.calls", "bare-name", id="a test by a bare name"),
        pytest.param("examples/x.py", "def f():\n    import workers", "bare-name", id="an example by a bare name"),
        pytest.param(
            "orchestrator/loop/x.py", "import toolcrew.orchestrator.dispatch", "arrow", id="the loop imports dispatch"
        ),
        pytest.param(
            "orchestrator/mcp/x.py", "import toolcrew.orchestrator.api.app", "arrow", id="MCP imports the API"
        ),
        ("orchestrator/cli/x.py", "def f():\n    from toolcrew.orchestrator.api.app import build_app", "arrow"),
        pytest.param(
            "orchestrator/models/x.py", "from toolcrew.store import calls", "arrow", id="a model imports the store"
        ),
        ("sandbox-images/guest/x.py", "from toolcrew.contract import calls", "arrow"),
        pytest.param("sandbox-images/guest/x.py", "import structlog", "third-party", id="the guest imports a package"),
        pytest.param("contract/x.py", "import structlog", "third-party", id="contract imports a package"),
        pytest.param("contract/x.py", "import socket", "contract-acts", id="contract opens sockets"),
        pytest.param("contract/x.py", "import asyncio.locks", "contract-acts", id="contract imports asyncio"),
        pytest.param("contract/x.py", "async def f() -> None: ...", "contract-acts", id="contract is async"),
        pytest.param("contract/x.py", "TEXT = open('x')", "contract-acts", id="contract opens files"),
        pytest.param("orchestrator/dispatch/dispatcher.py", "import celery.result", "wall", id="celery"),
        pytest.param("workers/executor.py", "import billiard", "wall", id="billiard"),
        pytest.param("workers/sandboxd/pool.py", "from docker.errors import APIError", "wall", id="docker"),
        pytest.param("orchestrator/models/local.py", "import openai", "wall", id="openai"),
        pytest.param("orchestrator/admission.py", "from redis.asyncio import Redis", "wall", id="redis"),
        pytest.param("orchestrator/batch.py", "import typer", "wall", id="typer"),
        pytest.param("orchestrator/http/x.py", "import fastapi", "wall", id="fastapi"),
        pytest.param("orchestrator/api/server.py", "import uvicorn", "wall", id="uvicorn"),
        pytest.param("orchestrator/mcp/calls.py", "from starlette.types import Scope", "wall", id="starlette"),
        pytest.param("workers/logs.py", "from rich import print", "wall", id="rich"),
        pytest.param("workers/x.py", "from http import server", "wall", id="an HTTP server"),
        ("workers/x.py", "from pydantic_settings import BaseSettings", "wall"),
        ("orchestrator/operations/local_stack.py", "import os\nE = dict(os.environ)", "environment"),
        ("workers/settings.py", "from os import environ", "environment"),
        pytest.param("workers/x.py", "from os import environ as e", "environment", id="environ under another name"),
        pytest.param("contract/x.py", "import os\nos.putenv('A', 'b')", "environment", id="the environment is written"),
        ("workers/x.py", "class C:\n    def __init__(self, a, b, c, d, e, f, *, g, h): ...", "constructor"),
        pytest.param("workers/x.py", "def f(:", "syntax", id="a file that is not Python"),
        pytest.param("tests/unit/test_x.py", "\n" * 801, "length", id="a test over 800 lines"),
        pytest.param("scripts/x", "#!/bin/sh\n" + "true\n" * 801, "length", id="a script over 800 lines"),
    ],
)
def test_a_violation_is_reported_with_its_file_and_line(tmp_path: Path, path: str, source: str, rule: str) -> None:
    write_tree(tmp_path, {**CLEAN_TREE, path: source})
    violations = find_violations(tmp_path)
    assert [(where, name) for where, _, name in violations] == [(path, rule)]
    if rule in ("arrow", "wall", "third-party"):
        assert violations[0][1] == 1 + len(source.splitlines())  # the last line, below the docstring


@pytest.mark.parametrize("package", ["contract", "orchestrator", "workers", "sandbox-images/guest", "tests"])
def test_a_module_without_a_docstring_is_found(tmp_path: Path, package: str) -> None:
    write_tree(tmp_path, CLEAN_TREE)
    (tmp_path / package / "bare.py").write_text("X = 1\n")
    assert find_violations(tmp_path) == [(f"{package}/bare.py", 1, "docstring")]


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({"a": "from toolcrew.store import b", "b": "import toolcrew.store.a"}, id="two modules"),
        pytest.param(
            {"a": "from . import b", "b": "from .c import X", "c": "def f():\n    from . import a"},
            id="three modules, one lazy import",
        ),
        pytest.param(
            {"__init__": "from toolcrew.store import b", "b": "from toolcrew.store import VERSION"},
            id="a package and its part",
        ),
    ],
)
def test_a_module_import_cycle_is_found(tmp_path: Path, files: dict[str, str]) -> None:
    write_tree(tmp_path, {**CLEAN_TREE, **{f"store/{name}.py": source for name, source in files.items()}})
    assert [rule for _, _, rule in find_violations(tmp_path)] == ["cycle"]


@pytest.mark.parametrize(
    ("one", "other"),
    [("orchestrator/loop", "orchestrator/dialects"), ("workers/sandboxd/runtime", "workers/sandboxd/disks")],
)
def test_a_folder_cycle_without_a_module_cycle_is_found(tmp_path: Path, one: str, other: str) -> None:
    write_tree(tmp_path, CLEAN_TREE)
    import_back = f"import toolcrew.{one.replace('/', '.')}.two"
    files = {
        f"{one}/one.py": f"import toolcrew.{other.replace('/', '.')}.one",
        f"{one}/two.py": "X = 1",
        f"{other}/one.py": "X = 1",
        f"{other}/two.py": f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {import_back}",
    }
    write_tree(tmp_path, {path: f'"""Its duty."""\n{source}\n' for path, source in files.items()})
    assert [rule for _, _, rule in find_violations(tmp_path)] == ["folder-cycle"]


def test_a_type_checking_import_may_not_cross_a_package_boundary(tmp_path: Path) -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import toolcrew.orchestrator"
    write_tree(tmp_path, {**CLEAN_TREE, "workers/a.py": source})
    assert [rule for _, _, rule in find_violations(tmp_path)] == ["arrow"]
