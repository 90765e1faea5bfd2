"""A user asks for the size and the user of a sandbox: in a program, over HTTP, on the command line, in batch lines."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from docker import APIClient

from tests.support.cli.command_server import run_toolcrew
from tests.support.stack.stack import Stack, open_stack
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.session_spec import SandboxOptions
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session

pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(os.geteuid() != 0, reason="root inside needs sandboxes that sandboxd starts itself"),
]

MIB = 1024 * 1024
CLASSES = {"default": {"largest": {"cpus": 2, "workspace_bytes": 64 * MIB, "pids": 500, "user": "root"}}}
SHOW = "id -u; df -m --output=size /workspace | tail -1"
"""Prints the user and the size of the disk in MiB."""


@pytest.fixture(scope="module")
def stack(engine: APIClient) -> Iterator[Stack]:
    environment = {"TOOLCREW_TENANT_CLASSES": json.dumps(CLASSES), "TOOLCREW_SANDBOX_WORKSPACE_BYTES": str(16 * MIB)}
    with open_stack(engine, environment, workers_only=False) as opened:
        yield opened


def parse_sizes(output: str | None) -> tuple[int, int]:
    user, size = (output or "").split()
    return int(user), int(size)


async def test_a_program_opens_a_session_with_sizes_and_user(stack: Stack) -> None:
    async with ToolClient.connect(stack.redis_url) as client:
        options = SandboxOptions(cpus=0.5, workspace_bytes=32 * MIB, pids=400, user="root")
        async with await client.open_session(options=options) as session:
            assert (await session.info()).options.model_dump() == {**options.model_dump(), "memory_bytes": 416 * MIB}
            user, size = parse_sizes((await session.call("bash_tool", {"command": SHOW})).output)
            assert (user, 28 < size < 36) == (0, True)
            attached = await client.session(session.id)
            assert (await attached.info()).options.user == "root"
        with pytest.raises(ToolFailure, match=r"pids is 501.*class 'default' may have at most 500") as refused:
            await client.open_session(options=SandboxOptions(pids=501))
        assert refused.value.code is ErrorCode.INVALID_ARGUMENTS


async def test_file_tools_of_a_root_session_work_on_every_file(stack: Stack) -> None:
    async with ToolClient.connect(stack.redis_url) as client:

        async def call(session: Session, tool: str, **arguments: str) -> str:
            result = await session.call(tool, arguments, timeout_s=SOON_S)  # a search of / takes long on a busy machine
            return result.output if result.success and result.output else result.text()

        async with await client.open_session(options=SandboxOptions(user="root")) as session:
            await call(session, "write_tool", path="/srv/app/main.py", content="answer = 41\n")
            await call(session, "bash_tool", command="ln -s /srv/app/main.py /etc/app.py; cd /srv")
            await call(session, "read_tool", path="/etc/app.py")
            await call(session, "edit_tool", path="../srv/app/main.py", old_string="41", new_string="42")
            assert "answer = 42" in await call(session, "read_tool", path="app/main.py")
            assert "main.py" in await call(session, "grep_tool", pattern="answer", path="/srv")
            assert "/usr/lib/os-release" in await call(session, "glob_tool", pattern="os-rel*", path="/usr/lib")
            assert "/etc/passwd" in await call(session, "read_tool", path="/etc/paswd")
            assert (await call(session, "bash_tool", command="pwd; cat app/main.py")).split() == [
                "/srv",
                "answer",
                "=",
                "42",
            ]
            await session.write_file("/run.sh", b"exit 7\n")
            for tool, pattern in (("glob_tool", "*.sh"), ("grep_tool", "^exit 7$")):
                found = await call(session, tool, pattern=pattern, path="/")
                assert ("/run.sh" in found, "/proc" in found, "/sys" in found) == (True, False, False), found
            assert "PATH_NOT_ALLOWED" in await call(session, "read_tool", path="/etc/../proc/self/status")
            assert (await session.exec(["sh", "/run.sh"], cwd="/etc")).returncode == 7
        async with await client.open_session() as session:
            for tool, fields in (("read_tool", {}), ("write_tool", {"content": "x"})):
                refused = await session.call(tool, {"path": "/etc/hostname", **fields})
                assert refused.error_code is ErrorCode.PATH_NOT_ALLOWED


async def test_an_http_client_opens_a_session_with_sizes_and_user(stack: Stack) -> None:
    headers = {"Authorization": f"Bearer {stack.info.api_key}"}
    async with httpx.AsyncClient(base_url=str(stack.info.api_url), headers=headers, timeout=60) as client:
        options = {"cpus": 1.5, "workspace_bytes": 32 * MIB, "user": "root"}
        opened = await client.post("/v1/sessions", json=options)
        assert opened.status_code == 201, opened.text
        session = opened.json()
        assert {name: session[name] for name in options} == options
        await client.delete(f"/v1/sessions/{session['id']}")
        refused = await client.post("/v1/sessions", json={"cpus": 3})
        assert (refused.status_code, "at most 2" in refused.text) == (422, True)
        assert (await client.post("/v1/sessions", json={"cpus": -1})).status_code == 422


def test_the_command_line_opens_a_session_with_sizes_and_user(stack: Stack) -> None:
    def toolcrew(*arguments: str) -> Any:
        environment = {"TOOLCREW_REDIS_URL": stack.redis_url}
        return run_toolcrew(stack.footprint, *arguments, environment=environment)

    opened = toolcrew("sessions", "open", "--sandbox", "cpus=2,memory=1GiB,user=root", "--json")
    assert "memory_bytes is 1073741824" in json.loads(opened.stdout)["error"]["message"]
    opened = toolcrew("sessions", "open", "--sandbox", "workspace=32MiB,pids=400,user=root", "--json")
    session = json.loads(opened.stdout)
    assert (session["workspace_bytes"], session["pids"], session["user"]) == (32 * MIB, 400, "root")
    assert toolcrew("sessions", "close", session["id"]).returncode == 0
    wrong = toolcrew("sessions", "open", "--sandbox", "disk=1")
    assert (wrong.returncode, "cpus, memory, workspace, pids, user" in wrong.stderr) == (2, True)


def test_lines_of_a_batch_have_their_own_sizes_and_user(stack: Stack, tmp_path: Path) -> None:
    lines = [
        {"id": "own", "tool": "bash_tool", "arguments": {"command": SHOW}, "workspace_bytes": 48 * MIB},
        {"id": "default", "tool": "bash_tool", "arguments": {"command": SHOW}, "user": "sandbox"},
    ]
    large = {"id": "large", "tool": "bash_tool", "arguments": {"command": SHOW}, "cpus": 64}
    file, rows = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    command = ("batches", "submit", str(file), "--sandbox", "workspace=32MiB,user=root", "--output", str(rows))

    def submit(*sent: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
        file.write_text("".join(json.dumps(line) + "\n" for line in sent))
        return run_toolcrew(stack.footprint, *command, environment={"TOOLCREW_REDIS_URL": stack.redis_url})

    refused = submit(*lines, large)
    assert (refused.returncode != 0, "line 3: `cpus`" in refused.stderr, rows.exists()) == (True, True, False)
    done = submit(*lines)
    assert done.returncode == 0, done.stderr
    outputs = {row["custom_id"]: parse_sizes(row["response"]["body"]["output"]) for row in map(json.loads, rows.open())}
    assert {name: user for name, (user, _) in outputs.items()} == {"own": 0, "default": 1000}
    assert 42 < outputs["own"][1] < 54
    assert 28 < outputs["default"][1] < 36
