"""A call through the whole stack: the results of tools, programs and files."""

import asyncio
import contextlib
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.redis.raw_queue import open_dispatcher
from tests.support.sandboxd.containers import watch
from tests.support.stack.processes import read_proc
from tests.support.stack.stack import Stack, all_of, commands_in, is_alive
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.names import blob_key
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session

pytestmark = pytest.mark.stack

MIB = 1024 * 1024


async def test_a_bash_result_contains_both_streams_the_exit_code_and_the_folder(session: Session) -> None:
    result = await session.call("bash_tool", {"command": "echo out; echo err >&2; exit 3"}, call_id="main-path-1")

    assert (result.call_id, result.name, result.success, result.error_code) == ("main-path-1", "bash_tool", True, None)
    assert result.metadata == {"stdout": "out\n", "stderr": "err\n", "exit_code": 3, "cwd": "/workspace"}
    assert sorted((result.output or "").splitlines()) == ["[exit code 3]", "err", "out"]
    assert (result.truncated, result.kill) == (False, None)


async def test_the_clocks_of_a_call_add_up_to_at_most_the_wall_time(session: Session) -> None:
    started = time.monotonic()
    result = await session.call("bash_tool", {"command": "sleep 0.5"})
    wall_s = time.monotonic() - started

    clocks = result.clocks
    assert 0.5 <= clocks.run_s < wall_s
    assert min(clocks.queued_s, clocks.sandbox_s, clocks.transfer_s) >= 0
    # The wait in the queue is measured by the clock of Redis, which a busy machine reads late. A time that counts twice
    # would add more than this.
    assert clocks.queued_s + clocks.sandbox_s + clocks.run_s + clocks.transfer_s <= wall_s + 0.2


async def test_a_result_names_the_container_that_ran_it(stack: Stack, session: Session) -> None:
    result = await session.call("bash_tool", {"command": "true"})
    info = await session.info()

    assert result.sandbox is not None
    assert (result.sandbox.generation, result.sandbox.rebuilt) == (1, False)
    assert info.sandbox is not None
    assert info.sandbox.id == result.sandbox.id
    watched = watch(stack.api, result.sandbox.id)
    assert is_alive(watched.pid)
    assert [line.split(":")[0].strip() for line in read_proc(watched.pid, "net/dev").decode().splitlines()[2:]] == [
        "lo"
    ]


async def test_a_file_written_by_a_tool_is_read_by_a_tool_with_line_numbers(session: Session) -> None:
    wrote = await session.call("write_tool", {"file_path": "notes/a.txt", "content": "one\ntwo\n"})
    read = await session.call("read_tool", {"path": "notes/a.txt"})

    assert wrote.metadata == {"size_bytes": 8, "created": True, "encoding": "utf-8"}
    assert read.output == "1\tone\n2\ttwo\n[end of file: 2 lines]"
    assert read.metadata["aliases_used"] == ["path -> file_path"]


async def test_internal_session_operations_are_not_listed_as_tools(client: ToolClient) -> None:
    names = [
        f"{name}_tool" for name in ("bash", "edit", "glob", "grep", "read", "skill", "webfetch", "websearch", "write")
    ]
    shipped = ["table-profile", "vector-search", "word-count"]
    assert sorted(spec.name for spec in await client.tools()) == sorted(names + shipped)


async def test_programs_of_one_session_run_in_parallel(session: Session) -> None:
    started = time.monotonic()
    results = await all_of((session.exec(["sh", "-c", f"sleep 1; echo {n}"]) for n in range(3)), 30)

    assert [result.stdout for result in results] == [b"0\n", b"1\n", b"2\n"]
    assert time.monotonic() - started < sum(result.clocks.run_s for result in results)


async def test_commands_of_one_session_run_one_after_the_other_and_share_its_state(session: Session) -> None:
    await session.call("bash_tool", {"command": "export n=0"})
    await all_of((session.call("bash_tool", {"command": "m=$n; sleep 0.1; export n=$((m + 1))"}) for _ in range(3)), 30)

    assert (await session.call("bash_tool", {"command": "echo $n"})).output == "3\n"


async def test_sessions_share_no_files_and_no_container(client: ToolClient) -> None:
    async def work(name: str) -> ToolResult:
        async with await client.open_session() as session:
            return await session.call("bash_tool", {"command": f"echo {name} >> f; sleep 0.3; cat f"})

    results = await all_of((work(name) for name in ("red", "green", "blue")), 60)

    assert [result.metadata["stdout"] for result in results] == ["red\n", "green\n", "blue\n"]
    assert len({result.sandbox.id for result in results if result.sandbox}) == 3


async def test_a_program_receives_and_returns_every_byte(session: Session) -> None:
    data = bytes(range(256)) * 1024

    result = await session.exec(["cat"], stdin=data)

    assert (result.returncode, result.stderr, result.truncated) == (0, b"", False)
    assert result.stdout == data


@pytest.mark.parametrize("size", [0, 1, 5 * MIB])
async def test_a_file_is_read_as_it_was_written(session: Session, size: int) -> None:
    data = os.urandom(size)

    await session.write_file("folder/data.bin", b"an earlier and replaced content")
    await session.write_file("folder/data.bin", data)

    assert await session.read_file("/workspace/folder/data.bin") == data


async def test_file_content_is_deleted_from_redis_after_the_call(stack: Stack, session: Session) -> None:
    await session.write_file("data.bin", b"x" * 100_000)
    await session.read_file("data.bin")
    await session.exec(["echo", "done"])

    with stack.open_redis() as redis:
        assert [key for key in redis.scan_iter(match="toolcrew:default:t:*:blob-*.*-*", count=1000)] == []


def build_workspace(folder: Path) -> None:
    (folder / "src" / "deep" / "er").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "src" / "deep" / "er" / "code.py").write_text("print('deep')\n")
    (folder / "grün 文件.txt").write_text("ünïcode\n")
    (folder / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("src/deep/er/code.py")
    (folder / ".hidden").write_bytes(bytes(range(256)))


async def test_a_folder_is_uploaded_and_exported_unchanged(client: ToolClient, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    build_workspace(source)

    async with await client.open_session(source) as session:
        inside = await session.call(
            "bash_tool", {"command": "./run.sh; cat link 'grün 文件.txt'; test -d empty && test -L link && echo kept"}
        )
        await session.call("bash_tool", {"command": "echo new > src/made.txt; rm .hidden"})
        await session.export(target)

    assert inside.metadata["stdout"] == "ran\nprint('deep')\nünïcode\nkept\n"
    (source / ".hidden").unlink()
    (source / "src" / "made.txt").write_text("new\n")
    assert describe(target) == describe(source)


def describe(folder: Path) -> dict[str, object]:
    """Return every entry with its kind, its content and whether it is executable."""
    entries: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            entries[name] = ("link", os.readlink(path))
        elif path.is_dir():
            entries[name] = "folder"
        else:
            entries[name] = (path.read_bytes(), bool(path.stat().st_mode & stat.S_IXUSR))
    return entries


async def test_an_exported_workspace_with_links_writes_nothing_outside(session: Session, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    await session.call("bash_tool", {"command": f"ln -s {outside} escape; ln -s ../outside escape2"})

    with contextlib.suppress(ToolFailure):
        await session.export(tmp_path / "out")

    assert list(outside.iterdir()) == []
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


async def test_a_tenant_cannot_use_the_session_id_of_another_tenant(stack: Stack, session: Session) -> None:
    queue = (await session.info()).queue
    await session.write_file("secret.txt", b"the secret")

    async with open_dispatcher(stack.broker) as dispatcher:
        for route in (("mallory", session.id, queue), ("mallory", f"default:{session.id}"[:64], queue)):
            call = ToolCall(id=os.urandom(8).hex(), name="bash_tool", arguments={"command": "cat secret.txt"})
            result = await dispatcher.dispatch(Request(call, *route))
            assert result.error_code in (ErrorCode.SESSION_NOT_FOUND, ErrorCode.INVALID_ARGUMENTS)
            assert "the secret" not in str(result)
            assert "the secret" not in result.model_dump_json()


async def test_a_tenant_cannot_use_the_blob_key_of_another_tenant(stack: Stack, client: ToolClient) -> None:
    key = blob_key("default", "default", "sandbox", "stolen")
    with stack.open_redis() as redis:
        redis.set(key, b"the secret", ex=60)
        async with await client.open_session(tenant="mallory") as mine, open_dispatcher(stack.broker) as dispatcher:
            call = ToolCall(id=os.urandom(8).hex(), name="session.write_file", arguments={"path": "loot"})
            route = ("mallory", mine.id, (await mine.info()).queue)
            result = await dispatcher.dispatch(Request(call, *route, blob=key, audience="session"))

            assert result.error_code == ErrorCode.PERMISSION_DENIED
            assert redis.getdel(key) == b"the secret"
            with pytest.raises(ToolFailure):
                await mine.read_file("loot")


async def test_a_closed_session_has_no_container_and_is_not_found(stack: Stack, client: ToolClient) -> None:
    async with await client.open_session() as session:
        result = await session.call("bash_tool", {"command": "true"})
        assert result.sandbox is not None
        container = result.sandbox.id
        assert stack.has_container(container)
        running = asyncio.create_task(session.call("bash_tool", {"command": "sleep 987"}))
        await wait_until_async(
            lambda: any("sleep 987" in command for command in commands_in(container).values()), SOON_S, "the call runs"
        )

    assert (await running).error_code == ErrorCode.CANCELLED
    assert not stack.has_container(container)
    late = await session.call("bash_tool", {"command": "true"})
    assert late.error_code == ErrorCode.SESSION_NOT_FOUND


async def test_an_unused_session_expires(stack: Stack, client: ToolClient) -> None:
    session = await client.open_session(ttl_s=1)
    sandbox = (await session.info()).sandbox
    assert sandbox is not None

    await wait_until_async(
        lambda: not stack.has_container(sandbox.id), SOON_S, "the idle session's container is removed"
    )
    await session.close()


async def test_keys_in_redis_contain_no_password_and_no_output(stack: Stack, session: Session) -> None:
    await session.call("bash_tool", {"command": "echo only-in-the-result"})

    with stack.open_redis() as redis:
        texts = [_read_key(redis, key) for key in redis.scan_iter(match="toolcrew:*", count=1000)]

    assert texts
    assert not any("only-in-the-result" in text for text in texts)
    assert not any(stack.info.redis_url in text for text in texts)


def _read_key(redis: Any, key: bytes) -> str:
    """Return the value of a key, of any type."""
    readers = {
        b"string": redis.get,
        b"hash": redis.hgetall,
        b"list": lambda name: redis.lrange(name, 0, -1),
        b"set": redis.smembers,
        b"zset": lambda name: redis.zrange(name, 0, -1),
        b"stream": redis.xrange,
        b"none": lambda _: None,
    }
    return str(readers[redis.type(key)](key))
