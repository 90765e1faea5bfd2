"""Checkpoints through the whole stack. Another session restores the content of a session, even after the first
session is lost.
"""

import asyncio

import pytest

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session

pytestmark = pytest.mark.stack

FILL = """
set -e
mkdir -p 'a dir/closed' && printf 'kept\\n' > 'a dir/f' && chmod 640 'a dir/f' && touch -d '2001-02-03 04:05:06.789' 'a dir/f'
ln -s /etc/passwd link && ln 'a dir/f' same && mkfifo pipe
printf secret > none && chmod 000 none && printf in > 'a dir/closed/in' && chmod 000 'a dir/closed'
truncate -s 200M sparse
cd 'a dir' && export COLOUR=blue && greet() { echo hello; }
"""
LOOK = """
pwd; echo $COLOUR; greet; cd /workspace
stat -c '%a %Y %h' 'a dir/f'; readlink link; stat -c '%F' pipe; cat same
cat none 'a dir/closed/in'; stat -c '%s %b' sparse; ls -A
"""


async def bash(session: Session, command: str) -> str:
    result = await session.call("bash_tool", {"command": command})
    assert result.success, result.error
    return str(result.metadata["stdout"])


async def test_a_checkpoint_restores_files_and_shell_state(client: ToolClient) -> None:
    async with await client.open_session() as session:
        await bash(session, FILL)
        checkpoint = await session.checkpoint()
        still = await bash(session, "cd /workspace; stat -c %a none 'a dir/closed'; cd 'a dir'")
        assert still.split() == ["0", "0"], "what was opened to be read is closed again"
        await bash(session, "rm -rf /workspace/* || true")

    async with await client.open_session(restore=checkpoint) as restored:
        lines = (await bash(restored, LOOK)).splitlines()

    # Files that the owner could not read are readable after a restore: docs/sessions.md.
    assert lines[:3] == ["/workspace/a dir", "blue", "hello"]
    assert lines[3:7] == ["640 981173106 2", "/etc/passwd", "fifo", "kept"]
    assert lines[7] == "secretin" + "209715200 0"
    assert checkpoint.bytes < 1_000_000
    assert (checkpoint.skipped, checkpoint.files_changed) == (0, False)


async def test_a_checkpoint_outlives_its_session_and_restores_several_equal_sessions(client: ToolClient) -> None:
    async with await client.open_session() as session:
        await session.write_file("f", b"first")
        checkpoint = await session.checkpoint()
        await session.write_file("f", b"second")
    sessions = await asyncio.gather(client.open_session(restore=checkpoint), client.open_session(restore=checkpoint.id))
    try:
        assert [await one.read_file("f") for one in sessions] == [b"first", b"first"]
        await sessions[0].write_file("f", b"mine")
        assert await sessions[1].read_file("f") == b"first"
    finally:
        await asyncio.gather(*(one.close() for one in sessions))


async def test_a_deleted_checkpoint_or_one_of_another_tenant_is_not_found(client: ToolClient) -> None:
    async with await client.open_session() as session:
        checkpoint = await session.checkpoint()
    assert await client.delete_checkpoint(checkpoint, tenant="umbrella") is False
    with pytest.raises(ToolFailure, match="no such checkpoint") as refused:
        await client.open_session(restore=checkpoint, tenant="umbrella")
    assert refused.value.code is ErrorCode.FILE_NOT_FOUND
    assert await client.delete_checkpoint(checkpoint) is True
    with pytest.raises(ToolFailure, match="no such checkpoint"):
        await client.open_session(restore=checkpoint)


async def test_a_checkpoint_can_be_created_while_calls_run(client: ToolClient) -> None:
    async with await client.open_session() as session:
        running = asyncio.create_task(
            bash(session, "for i in $(seq 40); do echo $i >> grows; sleep 0.02; done; echo done")
        )
        checkpoint = await session.checkpoint()
        assert (await running).strip() == "done"
    async with await client.open_session(restore=checkpoint) as restored:
        await restored.write_file("after", b"works")
