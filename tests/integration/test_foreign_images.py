"""Sessions in images that are not made for toolcrew: without bash and tar, with variables that change how programs
start, and with folders of their own. Each test runs with both starts of sandboxes.
"""

import asyncio
import json
import secrets
import shlex
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from docker import APIClient

from tests.integration.test_images import build_tree, read_files
from tests.support.sandboxd.containers import IMAGE, LABELS, open_container
from tests.support.stack.stack import Stack, open_stack
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session

pytestmark = pytest.mark.stack

SH = "/usr/bin/sh"
"""The only program of the images: a bash of another name."""
OTHER_TAR = (
    b"#!/usr/bin/sh\necho \"tar: unrecognized option '--format=posix'\" >&2; echo 'BusyBox v1.36.1' >&2; exit 1\n"
)
NOISE = b"echo noise; echo noise >&2; set -f; cd /; IFS=x\n"
VARIABLES = {
    "EMPTY": "",
    "SEVERAL_LINES": "first\nsecond\n",
    "CONTROL": "\x01\x1b[31m\x7f\t",
    "QUOTES": "a'b\"c$(exit 3)`exit 3`\\",
    "not.a-name": "kept",
    "ENV": "/no/such/file",
    "PS4": "$(exit 3)+",
    "CDPATH": "/",
    "TMOUT": "1",
    "GLOBIGNORE": "*",
    "POSIXLY_CORRECT": "1",
    "BASH_ENV": "/etc/noise",
    "LD_PRELOAD": "/no/such/library.so",
    "LD_AUDIT": "/no/such/library.so",
    "LD_LIBRARY_PATH": "/usr/bin",
    "LD_DEBUG": "unused",
    "LC_ALL": "tr_TR.ISO-8859-9",
    "LOCPATH": "/no/such/folder",
    "GCONV_PATH": "/no/such/folder",
    "TAR_OPTIONS": "--exclude=kept",
    "LOGNAME": "someone",
}
"""Variables that programs get as they are."""
SHELL_VARIABLES = {"SHELLOPTS": "noexec:xtrace", "BASHOPTS": "extdebug", "BASH_FUNC_builtin%%": "() { exit 3; }"}
"""Variables that no program gets: docs/images.md."""
SHOW = "while IFS= read -r -d '' variable; do printf '%s\\0' \"$variable\"; done < /proc/self/environ"


@dataclass(frozen=True)
class Images:
    bare: str
    variables: str


@pytest.fixture(scope="module")
def images(engine: APIClient) -> Iterator[Images]:
    program = read_files(engine, IMAGE, "/opt/toolcrew/bin/bash")["bash"]
    files = [("usr/bin/sh", 0o755, program)]
    files += [(f"usr/bin/{name}", 0o755, OTHER_TAR) for name in ("tar", "find", "cat", "mkdir", "head")]
    files += [("etc/noise", 0o644, NOISE)]
    bare, variables = (f"toolcrew-test-foreign:{secrets.token_hex(6)}" for _ in range(2))
    engine.import_image(build_tree(files), *bare.split(":"))
    # A Dockerfile cannot set variables of several lines.
    config = {"Image": bare, "Cmd": ["none"], "Env": [f"{n}={v}" for n, v in {**VARIABLES, **SHELL_VARIABLES}.items()]}
    with open_container(engine, {**config, "Labels": LABELS}) as container:
        engine.commit(container, *variables.split(":"))
    yield Images(bare, variables)
    for image in (variables, bare):
        engine.remove_image(image, force=True)


@pytest.fixture(scope="module", params=["oci", "engine"])
def foreign_stack(request: pytest.FixtureRequest, engine: APIClient, images: Images) -> Iterator[Stack]:
    environment = {
        "TOOLCREW_SANDBOX_IMAGES_ALLOWED": json.dumps([images.bare, images.variables]),
        "TOOLCREW_SANDBOX_START": request.param,
        "TOOLCREW_POOL_SIZE": "0",
    }
    with open_stack(engine, environment) as opened:
        yield opened


@pytest.fixture
async def client(foreign_stack: Stack) -> AsyncIterator[ToolClient]:
    async with ToolClient.connect(foreign_stack.redis_url) as connected:
        yield connected


async def call(session: Session, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await session.call(tool, arguments)
    assert result.success, result.error
    return dict(result.metadata)


async def bash(session: Session, command: str) -> str:
    return str((await call(session, "bash_tool", command=command))["stdout"])


@pytest.mark.parametrize("kind", ["bare", "variables"])
async def test_copies_checkpoints_forks_jobs_and_searches_need_no_program_of_the_image(
    client: ToolClient, images: Images, kind: str, tmp_path: Any
) -> None:
    (tmp_path / "kept").write_text("needle\n")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("x")
    look = 'echo "$PWD $COLOUR $(</workspace/kept)"'
    async with await client.open_session(tmp_path, image=getattr(images, kind)) as session:
        await bash(session, "cd d; export COLOUR=blue")
        assert await bash(session, look) == "/workspace/d blue needle\n"
        checkpoint = await session.checkpoint()
        assert "kept" in (await session.list_files()).files
        assert (await call(session, "glob_tool", pattern="/workspace/**"))["total"] == 2
        assert (await call(session, "grep_tool", pattern="needle", path="/workspace"))["matches"] == 1
        assert await session.export(tmp_path / "out") == []
        assert (tmp_path / "out" / "kept").read_text() == "needle\n"
        await session.import_archive(build_tree([("new", 0o644, b"y")]), "/workspace/below/this")
        assert await session.read_file("/workspace/below/this/new") == b"y"
        job = await call(session, "bash_tool", command="echo $COLOUR; read -t 60 < /dev/zero", background=True)
        assert "job" in str(job)
        await session.end_jobs()
        [fork] = await session.fork()
        async with fork:
            assert await bash(fork, look) == "/workspace/d blue needle\n"
    async with await client.open_session(image=getattr(images, kind), restore=checkpoint) as restored:
        assert await bash(restored, look) == "/workspace/d blue needle\n"


async def test_programs_get_the_variables_of_the_image_as_they_are(client: ToolClient, images: Images) -> None:
    async with await client.open_session(image=images.variables) as session:
        direct = await session.exec([SH, "-p", "-c", SHOW])
        shown = dict(text.split("=", 1) for text in direct.stdout.decode().split("\0") if text)
        assert {name: shown.get(name) for name in VARIABLES} == VARIABLES
        assert not set(SHELL_VARIABLES) & set(shown)
        assert not [name for name in shown if "TOOLCREW" in name]
        assert (shown["HOME"], shown["USER"]) == ("/home/sandbox", "sandbox")
        for _ in range(2):
            result = await session.call("bash_tool", {"command": f"{SH} -p -c {shlex.quote(SHOW)} > shown"})
            below = dict(text.split("=", 1) for text in (await session.read_file("shown")).decode().split("\0") if text)
            assert {name: below.get(name) for name in VARIABLES} == VARIABLES, result


async def test_variables_of_the_image_change_neither_state_nor_folder_nor_exit_codes(
    client: ToolClient, images: Images
) -> None:
    async with await client.open_session(image=images.variables) as session:
        first = await session.call("bash_tool", {"command": "cd /tmp; export A=1; (exit 3) | (exit 4)"})
        assert (first.metadata["exit_code"], first.metadata["stdout"]) == (4, "")
        second = await session.call("bash_tool", {"command": 'echo "$PWD $A"; say() { echo said; }; exit 7'})
        assert (second.metadata["exit_code"], second.metadata["stdout"]) == (7, "/tmp 1\n")
        assert await bash(session, "say") == "said\n"
        done = await asyncio.gather(*(session.exec(["bash", "-c", "exit 9"]) for _ in range(2)))
        assert [result.returncode for result in done] == [9, 9]
