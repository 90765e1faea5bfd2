"""The HTTP clients with processes, files and ports, on the stream server of the guest without a container."""

import asyncio
import os
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from tests.support.api.api_harness import ApiHarness
from tests.support.api.local_streams import LocalStreams
from tests.support.api.stream_service import BreakingNetwork
from tests.support.cli.pty_command import at_terminal
from tests.support.stack.waiting import SOON_S
from toolcrew import AsyncClient, Client, ErrorCode, ToolFailure
from toolcrew.orchestrator.sdk.http import handshakes
from toolcrew.orchestrator.sdk.http.async_client import AsyncSession

MIB = 1024 * 1024


@pytest.fixture
async def network(local_streams: LocalStreams, api: ApiHarness) -> AsyncIterator[tuple[BreakingNetwork, str]]:
    network = BreakingNetwork(api.url)
    async with network.serving() as url:
        yield network, url


@pytest.fixture
async def opened(network: tuple[BreakingNetwork, str], api: ApiHarness, session: str) -> AsyncIterator[AsyncSession]:
    async with AsyncClient(network[1], api.keys["acme"]) as client:
        yield client.sessions.get(session.rpartition("/")[2])


async def test_a_process_reads_its_input_to_the_end(opened: AsyncSession) -> None:
    argv = ["sh", "-c", 'echo "$A"; pwd >&2; tr a-z A-Z; exit 3']
    async with await opened.processes.start(argv, env={"A": "b"}, cwd="/", tag="upper") as process:
        await process.write("one\n")
        await process.write(b"two\n" * 50_000)
        await process.close_stdin()
        pieces = [piece async for piece in process]
        end = await process.wait()
    output = b"".join(piece.data for piece in pieces if piece.stream == "stdout")
    assert output == b"b\nONE\n" + b"TWO\n" * 50_000
    assert b"".join(piece.data for piece in pieces if piece.stream == "stderr") == b"/\n"
    assert (end.exit_code, end.signal, end.lost_bytes) == (3, None, 0)
    (found,) = await opened.processes.list()
    assert (found.tag, found.end is not None, found.argv[0]) == ("upper", True, "sh")
    again = opened.processes.attach(process.process)
    assert b"".join([piece.data async for piece in again]) == b"".join(piece.data for piece in pieces)


async def test_a_terminal_has_a_size_and_signals(opened: AsyncSession) -> None:
    async with await opened.processes.start(["sh"], pty=(100, 30)) as process:
        await process.write("stty size\n")
        seen = b""
        while b"30 100" not in seen:
            seen += await process.read()
        await process.resize(90, 20)
        await process.write("stty size\n")
        while b"20 90" not in seen:
            seen += await process.read()
        with pytest.raises(ToolFailure) as running:
            await process.wait(0.01)
        assert running.value.code is ErrorCode.TIMEOUT
        await process.kill()
        assert (await process.wait()).signal == 9


async def test_a_program_that_does_not_exist_is_an_error(opened: AsyncSession) -> None:
    with pytest.raises(ToolFailure) as missing:
        await opened.processes.start(["no-such-program"])
    assert missing.value.code is not ErrorCode.INTERNAL
    with pytest.raises(ToolFailure):
        await opened.processes.attach(999).read()


async def test_a_terminal_survives_a_network_that_breaks(
    opened: AsyncSession, network: tuple[BreakingNetwork, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "_FIRST_PAUSE_S", 0.0)
    breaking, _ = network
    lines = [f"line {number}\n".encode() for number in range(200)]
    async with await opened.processes.start(["cat"]) as process:
        breaking.down[:] = [400 + 23 * number for number in range(10)]
        breaking.up[:] = [700 + 11 * number for number in range(10)]
        typing = asyncio.ensure_future(type_lines(process.write, lines))
        seen = b""
        while len(seen) < len(b"".join(lines)):
            seen += await process.read()
        await typing
        await process.close_stdin()
        assert (await process.wait()).exit_code == 0
    assert seen == b"".join(lines)
    assert breaking.broken >= 10


async def type_lines(write: Callable[[bytes], Awaitable[None]], lines: list[bytes]) -> None:
    for line in lines:
        await write(line)
        # Let the line be a message of its own.
        await asyncio.sleep(0)


async def test_waiting_does_not_hold_up_a_process_that_no_one_reads(opened: AsyncSession) -> None:
    async with await opened.processes.start(["head", "-c", str(8 * MIB), "/dev/zero"]) as process:
        end = await asyncio.wait_for(process.wait(), SOON_S)
        assert end.exit_code == 0
        kept = sum([len(piece.data) async for piece in process])
    assert kept + process.lost_bytes == 8 * MIB
    assert kept >= MIB


async def test_entries_are_listed_changed_and_removed(opened: AsyncSession, local_streams: LocalStreams) -> None:
    files = opened.files
    names = ["a b", "é", "line\u2028separator", "new\x85line"]
    for name in names:
        await files.write(f"dir/{name}", name)
    assert sorted([entry.name async for entry in files.list("dir")]) == sorted(names)
    assert (await files.stat("dir/é")).size == 2
    assert (await files.make_folder("dir/deep/er")).type == "directory"
    assert (await files.move("dir/a b", "dir/deep/er/moved")).name == "moved"
    assert "moved" in [entry.name async for entry in files.list("dir", depth=3)]
    assert await files.read("dir/deep/er/moved") == b"a b"
    for _ in range(2):
        await files.remove("dir/é")
    with pytest.raises(ToolFailure) as missing:
        await files.stat("dir/é")
    assert missing.value.code is ErrorCode.FILE_NOT_FOUND


async def test_large_files_are_copied_over_a_network_that_breaks_in_constant_memory(
    opened: AsyncSession, network: tuple[BreakingNetwork, str], local_streams: LocalStreams, tmp_path: Path
) -> None:
    breaking, _ = network
    source, target = tmp_path / "source", tmp_path / "target"
    block = os.urandom(MIB)
    with source.open("wb") as out:
        for number in range(40):
            out.write(number.to_bytes(4, "big") + block)
    await opened.files.make_folder(".")
    tracemalloc.start()
    try:
        breaking.up[:] = [5 * MIB, 9 * MIB]
        await opened.files.upload(source, "large.bin")
        breaking.down[:] = [300, 3 * MIB, 12 * MIB]
        await opened.files.download("large.bin", target)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert breaking.broken >= 4
    assert target.read_bytes() == source.read_bytes() == (local_streams.workspace / "large.bin").read_bytes()
    assert sorted(os.listdir(local_streams.workspace)) == ["large.bin"]
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]
    assert peak < 24 * MIB


async def test_a_file_that_changes_during_a_download_is_read_again(
    opened: AsyncSession, network: tuple[BreakingNetwork, str], tmp_path: Path, local_streams: LocalStreams
) -> None:
    breaking, _ = network
    await opened.files.write("a", b"1" * 3 * MIB)
    path = local_streams.workspace / "a"

    def change() -> None:
        path.write_bytes(b"2" * 2 * MIB)
        os.utime(path, (1, 1))

    breaking.down[:] = [MIB]
    breaking.on_break = change
    await opened.files.download("a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"2" * 2 * MIB


async def test_a_failed_download_leaves_the_local_file(opened: AsyncSession, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(ToolFailure):
        await opened.files.download("missing", tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


async def test_changes_of_a_folder_are_watched_over_a_lost_connection(
    opened: AsyncSession, network: tuple[BreakingNetwork, str]
) -> None:
    breaking, _ = network
    await opened.files.make_folder("watched/deep")
    async with opened.files.watch("watched", recursive=True) as events:
        await opened.files.write("watched/deep/a", b"x")
        async for event in events:
            if event.name == "deep/a":
                break
        breaking.break_all()
        async for event in events:
            if event.event == "overflow":
                break
        await opened.files.write("watched/b", b"x")
        async for event in events:
            if event.name == "b":
                break


async def test_a_port_is_a_connection_with_two_directions(opened: AsyncSession) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()
        writer.write(data[::-1])
        writer.close()
        await writer.wait_closed()

    sent = os.urandom(3 * MIB)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with await opened.ports.connect(port) as connection:
            await connection.write(sent)
            await connection.close_input()
            received = bytearray()
            while data := await connection.read():
                received += data
    assert bytes(received) == sent[::-1]
    with pytest.raises(ToolFailure):
        await opened.ports.connect(port)


async def test_the_synchronous_client_does_the_same(session: str, api: ApiHarness, tmp_path: Path) -> None:
    await asyncio.to_thread(use_synchronously, api.url, api.keys["acme"], session.rpartition("/")[2], tmp_path)


def use_synchronously(url: str, key: str, session_id: str, folder: Path) -> None:
    with Client(url, key) as client:
        session = client.sessions.get(session_id)
        with session.processes.start(["cat"]) as process:
            read = bytearray()
            reader = threading.Thread(target=lambda: read.extend(b"".join(piece.data for piece in process)))
            reader.start()
            for _ in range(20):
                process.write(b"x" * 50_000)
            process.close_stdin()
            reader.join(60)
            assert bytes(read) == b"x" * 1_000_000
            assert process.wait(30).exit_code == 0
        (folder / "big").write_bytes(bytes(range(256)) * 40_000)
        session.files.upload(folder / "big", "big")
        session.files.download("big", folder / "copy")
        assert (folder / "copy").read_bytes() == (folder / "big").read_bytes()
        with session.files.watch(".") as events:
            session.files.write("seen", "x")
            assert next(events).name == "seen"
        assert "big" in [entry.name for entry in session.files.list(".")]


@pytest.fixture
def environment(local_streams: LocalStreams, api: ApiHarness) -> dict[str, str]:
    return {"TOOLCREW_URL": api.url, "TOOLCREW_API_KEY": api.keys["acme"], "TOOLCREW_REDIS_URL": ""}


async def test_a_shell_of_the_sandbox_is_used_at_a_terminal(session: str, environment: dict[str, str]) -> None:
    await asyncio.to_thread(use_shell, environment)


def use_shell(environment: dict[str, str]) -> None:
    with at_terminal("sessions", "shell", "s1", env=environment, cols=91, rows=33) as command:
        before = command.modes()
        command.type(b"stty size; echo $((6 * 7))-$TERM\r")
        command.wait_for(b"33 91")
        command.wait_for(b"42-xterm-256color")
        command.resize(100, 40)
        command.type(b"until [ \"$(stty size)\" = '40 100' ]; do :; done; echo resi''zed\r")
        command.wait_for(b"resized")
        command.type(b"sleep 100\r")
        command.type(b"\x03")
        # The terminal discards what was typed before an interruption.
        command.wait_for(b"^C")
        command.type(b"exit 5\r")
        assert command.wait() == 5
        assert command.modes() == before


async def test_a_port_is_forwarded_to_a_local_address(session: str, environment: dict[str, str]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = head.split(b" ")[1] * 200_000
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
        writer.close()
        await writer.wait_closed()

    argv = [sys.executable, "-m", "toolcrew.orchestrator", "sessions", "forward", "s1"]
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = str(server.sockets[0].getsockname()[1])
        process = await asyncio.create_subprocess_exec(
            *argv, port, "--local", "127.0.0.1:0", env={**os.environ, **environment}, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            line = await process.stdout.readline()
            url = line.decode().partition(" ")[0]
            async with httpx.AsyncClient() as client:
                answers = await asyncio.gather(*(client.get(f"{url}/{number}") for number in range(8)))
            assert [answer.text for answer in answers] == [f"/{number}" * 200_000 for number in range(8)]
        finally:
            process.terminate()
            await process.wait()


async def test_forwarding_from_an_unknown_session_is_an_error(session: str, environment: dict[str, str]) -> None:
    argv = [sys.executable, "-m", "toolcrew.orchestrator", "sessions", "forward", "unknown", "80", "--local", ":0"]
    process = await asyncio.create_subprocess_exec(
        *argv, env={**os.environ, **environment}, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert b"no such session" in errors
