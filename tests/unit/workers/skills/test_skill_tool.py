"""skill_tool over a scripted guest: its output, its refusals, and its requests to the sandbox."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.records.builders import build_context, build_exec_response
from tests.support.records.fakes import FakeSandboxClient, MemoryBlobs, MemoryLedger, build_executor
from tests.support.records.skill_harness import write_skill
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.registry import ToolRegistry
from toolcrew.contract.skill_sidecars import SIDECAR_FILE
from toolcrew.workers.sandbox_client import SandboxdUnreachable
from toolcrew.workers.skills.loader import load_skills
from toolcrew.workers.skills.tool import build_skill_tool, register_skill_tools
from toolcrew.workers.tools.base import Handler

EXEC_RESPONSE = build_exec_response()


class Bench:
    """skill_tool with the skills of a folder."""

    def __init__(self, root: Path, *answers: Any) -> None:
        self.client = FakeSandboxClient(*answers)
        self.skills = load_skills([root])
        self.tool = build_skill_tool(self.skills)
        executor = build_executor(
            ToolRegistry((self.tool,)),
            self.client,
            MemoryLedger(),
            MemoryBlobs(),
            {"host": "h1", "queue": "host.h1.b00t"},
        )
        self.executor = executor
        self.calls = 0

    def use(self, **arguments: Any) -> ToolResult:
        self.calls += 1
        return self.executor.execute(
            ToolCall(id=f"call-{self.calls}", name="skill_tool", arguments=arguments), build_context()
        )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files: dict[str, str | bytes] = {
        "scripts/a.py": "print(1)",
        "scripts/b": "#!/usr/bin/env -S python3 -u\n",
        "scripts/c": "#!/bin/bash -e\n",
        "scripts/e": "#! /usr/bin/env\tpython3\n",
        "scripts/f": "#!/usr/bin/env -S A=1 python3 -u\n",
        "scripts/g": "#!/usr/bin/env -i\n",
        "scripts/h": "#!/bin/sh -e -u\n",
        "scripts/d": b"\x7fELF",
        "picture.bin": b"\x89PNG\0",
        "long.md": "".join(f"line {number}\n" for number in range(1, 5001)),
        "wide.md": "x" * 3000,
    }
    write_skill(tmp_path, "alpha", body="Do alpha.", files=files)
    write_skill(tmp_path, "beta", files={f"data/{number:03}": "" for number in range(150)})
    (tmp_path / "secret").write_text("s")
    return tmp_path


def test_load_returns_instructions_and_at_most_100_files(root: Path) -> None:
    alpha, beta = Bench(root).use(name="alpha"), Bench(root).use(name="beta", action="load")
    assert alpha.text().startswith('<skill name="alpha">\nDo alpha.\n</skill>\n')
    assert "- scripts/a.py (8 bytes)" in alpha.text()
    assert not alpha.truncated
    assert beta.text().count("\n- ") == 100
    assert beta.text().endswith("[and 51 more]")
    assert beta.truncated


def test_read_returns_pages_of_numbered_lines(root: Path) -> None:
    def page(**arguments: Any) -> str:
        return Bench(root).use(name="alpha", action="read", **arguments).text()

    assert page(path="long.md").endswith("\n2000\tline 2000\n[lines 1-2000 of 5000; continue with offset=2001]")
    assert page(path="long.md", offset=4999) == "4999\tline 4999\n5000\tline 5000\n[end of file: 5000 lines]"
    assert len(page(path="long.md", limit=5000)) < 33_000
    assert page(path="wide.md").startswith("1\t" + "x" * 2000 + " [cut: 3000 characters]")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"action": "run", "script": "../SKILL.md"}, ErrorCode.FILE_NOT_FOUND),
        ({"action": "run", "script": "scripts/../../secret"}, ErrorCode.FILE_NOT_FOUND),
        ({"action": "run", "script": "/bin/sh"}, ErrorCode.FILE_NOT_FOUND),
        ({"action": "run", "script": "long.md"}, ErrorCode.FILE_NOT_FOUND),
        ({"path": "../secret"}, ErrorCode.FILE_NOT_FOUND),
        ({"path": "/etc/passwd"}, ErrorCode.FILE_NOT_FOUND),
        ({"path": "scripts/../../secret"}, ErrorCode.FILE_NOT_FOUND),
        ({"path": "picture.bin"}, ErrorCode.BINARY_FILE),
        ({"path": "long.md", "offset": 5001}, ErrorCode.OFFSET_OUT_OF_RANGE),
        ({}, ErrorCode.INVALID_ARGUMENTS),
        ({"path": "long.md", "script": "a.py"}, ErrorCode.INVALID_ARGUMENTS),
    ],
)
def test_files_outside_the_bundle_or_unreadable_are_refused(
    root: Path, arguments: dict[str, Any], code: ErrorCode
) -> None:
    bench = Bench(root)
    assert bench.use(**{"name": "alpha", "action": "read", **arguments}).error_code is code
    assert bench.client.requests == []


def test_unknown_skill_name_suggests_the_nearest(root: Path) -> None:
    result = Bench(root).use(name="alfa")
    assert (result.error_code, "there are alpha" in result.text()) == (ErrorCode.FILE_NOT_FOUND, True)


def test_bundle_is_sent_to_the_sandbox_once(root: Path) -> None:
    bench = Bench(root, build_exec_response(b"1\n"), build_exec_response(b"1\n"))
    for _ in range(2):
        assert bench.use(name="alpha", action="run", script="scripts/a.py").success
    assert bench.client.placed == 1


@pytest.mark.parametrize("content", [b"short", b"line 1\n" * 9999, b"\0" * 43893])
def test_files_changed_after_loading_are_not_sent(root: Path, content: bytes) -> None:
    bench = Bench(root)
    (root / "alpha" / "long.md").write_bytes(content)
    assert bench.use(name="alpha", action="run", script="a.py").error_code is ErrorCode.STALE_FILE
    assert bench.client.placed == 0


def test_file_that_grew_after_loading_is_refused(root: Path) -> None:
    bench = Bench(root)
    (root / "alpha" / "long.md").write_bytes(b"line 1\n" * 99999)
    assert bench.use(name="alpha", action="read", path="long.md").error_code is ErrorCode.STALE_FILE


@pytest.mark.parametrize(
    ("script", "prefix"),
    [
        ("b", ["python3", "-u"]),
        ("c", ["/bin/bash", "-e"]),
        ("d", []),
        ("e", ["python3"]),
        ("f", ["/usr/bin/env", "-S A=1 python3 -u"]),
        ("g", ["/usr/bin/env", "-i"]),
        ("h", ["/bin/sh", "-e -u"]),
    ],
)
def test_script_is_run_by_its_shebang_or_directly(root: Path, script: str, prefix: list[str]) -> None:
    bench = Bench(root, EXEC_RESPONSE)
    assert bench.use(name="alpha", action="run", script=script).success
    assert bench.client.requests[-1]["argv"][:-1] == prefix


@pytest.mark.parametrize(
    "arguments",
    [{"timeout": "5m"}, {"timeout": None}, {"timeout": 5000}, {"cwd": 7}, {"command": [1], "background": 1}],
)
def test_skill_parameters_may_have_any_name(tmp_path: Path, arguments: dict[str, Any]) -> None:
    sidecar = json.dumps(
        {
            "entrypoint": "scripts/a.sh",
            "parameters": {"type": "object", "properties": {name: {"description": "any"} for name in arguments}},
        }
    )
    write_skill(tmp_path, "a", files={"scripts/a.sh": "cat", SIDECAR_FILE: sidecar})
    client, registry = FakeSandboxClient(build_exec_response(b"1\n")), ToolRegistry[Handler]()
    register_skill_tools(registry, load_skills([tmp_path]))
    executor = build_executor(registry, client, MemoryLedger(), MemoryBlobs(), {"host": "h1", "queue": "host.h1.b00t"})
    result = executor.execute(ToolCall(id="call-1", name="a", arguments=arguments), build_context())
    assert (result.text(), json.loads(client.bodies[0])) == ("1\n", arguments)


def test_lost_sandboxd_during_a_skill_load_leaves_the_call_unstarted(root: Path) -> None:
    bench = Bench(root)

    def fail_unreachable(*_: Any, **__: Any) -> str:
        raise SandboxdUnreachable("sandboxd is ending", was_sent=True)

    bench.client.find_skill = fail_unreachable  # type: ignore[method-assign]
    result = bench.use(name="alpha", action="run", script="a.py")
    assert (result.error_code, result.metadata["not_run"]) == (ErrorCode.SANDBOX_UNAVAILABLE, "sandboxd")


def test_skill_list_in_the_description_is_bounded(tmp_path: Path) -> None:
    for number in range(40):
        write_skill(tmp_path, f"s{number}", front=f"name: s{number}\ndescription: {'word ' * 100}")
    bench = Bench(tmp_path)
    assert "s39" not in bench.tool.spec.description
    assert (bench.use(action="list").text()).count("\n- s") == 39
