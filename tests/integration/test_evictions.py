"""Eviction of sessions. A packed session continues unchanged for its user, and a session whose files no store accepts
stays alive.
"""

import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from docker import APIClient

from tests.support.stack.stack import Stack, missing, open_stack
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session

pytestmark = pytest.mark.stack

FILL = """
mkdir -p sub/deep && printf 'seen\\n' > seen && printf 'unseen\\n' > unseen && printf 'changed\\n' > changed
printf '#!/bin/sh\\necho ran\\n' > sub/run && chmod 6751 sub/run && ln sub/run sub/same && ln -s ../nowhere sub/link && mkfifo sub/pipe
truncate -s 100M sub/sparse && printf x | dd of=sub/sparse bs=1 seek=50000000 conv=notrunc status=none
touch sub/$'odd\\n\\377 -name' sub/-rf 'sub/*' && touch -d '2001-02-03 04:05:06.789012345' sub/run sub/deep
printf hidden > sub/none && chmod 000 sub/none && printf in > sub/deep/in
echo scratch > /tmp/file
export COLOUR=blue; greet() { echo "hello $1"; }; cd sub
"""
LOOK = """
pwd; echo "$COLOUR"; greet you; cat /tmp/file; ./run
stat -c '%a %h %.9Y' run; readlink link; stat -c '%F' pipe; stat -c '%s %b' sparse; ls -1A --quoting-style=c
"""


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if os.geteuid() != 0:
        missing("a small disk is mounted by root: run the tests as root")
    path = tmp_path_factory.mktemp("small-disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "toolcrew-test", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture(scope="module")
def evicting_stack(engine: APIClient, small_disk: Path) -> Iterator[Stack]:
    """Yield a stack whose workspaces disappear with their containers, so that every workspace must be packed."""
    environment = {
        "TOOLCREW_SANDBOX_WORKSPACE": "tmpfs",
        "TOOLCREW_IDLE_PAUSE_S": "0.5",
        "TOOLCREW_IDLE_EVICT_S": "1",
        "TOOLCREW_WORKSPACE_STORE": str(small_disk),
    }
    with open_stack(engine, environment) as stack:
        yield stack


@pytest.fixture
async def session(evicting_stack: Stack) -> AsyncIterator[Session]:
    async with ToolClient.connect(evicting_stack.redis_url) as client, await client.open_session() as opened:
        yield opened


async def bash(session: Session, command: str) -> str:
    result = await session.call("bash_tool", {"command": command})
    assert result.success, result.error
    return str(result.metadata["stdout"])


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def call_evicted(session: Session, stack: Stack) -> None:
    sandbox = (await session.call("bash_tool", {"command": "true"})).sandbox
    assert sandbox is not None
    await wait_until_async(
        lambda: not stack.has_container(sandbox.id), SOON_S, "the idle session's container is given up"
    )


async def test_an_evicted_session_continues_unchanged_with_the_next_call(
    evicting_stack: Stack, session: Session
) -> None:
    await bash(session, FILL)
    await session.call("read_tool", {"file_path": "/workspace/seen"})
    await session.call("read_tool", {"file_path": "/workspace/changed"})
    spilled = await session.call("bash_tool", {"command": "seq 100000"})
    before = await bash(session, LOOK)

    await call_evicted(session, evicting_stack)

    result = await session.call("bash_tool", {"command": LOOK})
    assert result.success, result.error
    assert result.metadata["stdout"] == before
    assert result.sandbox is not None
    assert (result.sandbox.generation, result.sandbox.rebuilt, result.sandbox.news) == (2, False, None)
    await bash(session, "echo changed >> /workspace/changed")
    written = {
        name: (await session.call("write_tool", {"file_path": f"/workspace/{name}", "content": "new\n"})).error_code
        for name in ("seen", "changed")
    }
    assert written == {"seen": None, "changed": "STALE_FILE"}
    path_match = re.search(r"/output/\S+?(?=[\s\])]|$)", spilled.output or "")
    assert path_match is not None, spilled.output
    assert (await bash(session, f"wc -l < {path_match[0].rstrip('.:,')}")).strip() == "100000"


async def test_a_full_store_leaves_the_session_running(session: Session, small_disk: Path) -> None:
    await bash(session, "head -c 100000000 /dev/urandom > large; export word=kept")
    with pytest.raises(SandboxUnavailable, match="free space"):
        await session.checkpoint()
    result = await session.call("bash_tool", {"command": 'stat -c %s large; echo "$word"; rm large'})
    assert (result.metadata["stdout"], result.sandbox and result.sandbox.generation) == ("100000000\nkept\n", 1)
    assert files_in(small_disk) == []
