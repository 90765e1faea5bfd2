"""Files of a session over HTTP, on the stream server of the guest without a container."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.api.api_harness import ApiHarness
from tests.support.api.local_streams import LocalStreams
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.file_views import FileEntry
from toolcrew.orchestrator.api import shares

# Before the API starts, whatever the order of a test's arguments.
pytestmark = pytest.mark.usefixtures("local_streams")

MIB = 1024 * 1024
CONTENT = bytes(range(256)) * 1000


@pytest.fixture
def client(api: ApiHarness) -> httpx.AsyncClient:
    return api["acme"]


def write(streams: LocalStreams, name: str, content: bytes = CONTENT) -> Path:
    path = streams.workspace / name
    path.write_bytes(content)
    return path


async def test_a_file_is_written_and_read_back(
    client: httpx.AsyncClient, session: str, local_streams: LocalStreams
) -> None:
    for content in (CONTENT, b""):
        put = await client.put(f"{session}/files/new/a.txt", content=content)
        assert (put.status_code, put.json()) == (200, {"path": "new/a.txt", "bytes": len(content)}), put.text
        assert (local_streams.workspace / "new/a.txt").read_bytes() == content
        got = await client.get(f"{session}/files/new/a.txt")
        assert (got.status_code, got.content, got.headers["content-type"]) == (200, content, "application/octet-stream")
        assert got.headers["content-length"] == str(len(content))


@pytest.mark.parametrize(
    ("header", "first", "last"),
    [
        ("bytes=0-0", 0, 0),
        ("bytes=10-19", 10, 19),
        ("bytes=255990-", 255_990, 255_999),
        ("bytes=-7", 255_993, 255_999),
        ("bytes=100-999999999", 100, 255_999),
        ("bytes=-999999999", 0, 255_999),
    ],
)
async def test_a_range_of_a_file_is_returned(
    client: httpx.AsyncClient, session: str, header: str, first: int, last: int
) -> None:
    assert (await client.put(f"{session}/files/a", content=CONTENT)).is_success
    got = await client.get(f"{session}/files/a", headers={"Range": header})
    assert (got.status_code, got.content) == (206, CONTENT[first : last + 1])
    assert got.headers["content-range"] == f"bytes {first}-{last}/{len(CONTENT)}"


@pytest.mark.parametrize("header", ["bytes=256000-", "bytes=999999-1000000", "bytes=-0"])
async def test_a_range_without_bytes_is_refused_with_the_size(
    client: httpx.AsyncClient, session: str, header: str
) -> None:
    assert (await client.put(f"{session}/files/a", content=CONTENT)).is_success
    got = await client.get(f"{session}/files/a", headers={"Range": header})
    assert (got.status_code, got.headers["content-range"]) == (416, f"bytes */{len(CONTENT)}")
    assert got.json()["code"] == "OFFSET_OUT_OF_RANGE"


async def test_if_range_returns_a_part_only_of_the_same_version(client: httpx.AsyncClient, session: str) -> None:
    path = f"{session}/files/a"
    assert (await client.put(path, content=b"one")).is_success
    etag = (await client.get(path)).headers["etag"]
    same = await client.get(path, headers={"Range": "bytes=1-", "If-Range": etag})
    assert (same.status_code, same.content, same.headers["etag"]) == (206, b"ne", etag)
    assert (await client.put(path, content=b"two")).is_success
    other = await client.get(path, headers={"Range": "bytes=1-", "If-Range": etag})
    assert (other.status_code, other.content) == (200, b"two")


async def test_an_upload_is_continued_at_an_offset(client: httpx.AsyncClient, session: str) -> None:
    path = f"{session}/files/a"
    assert (await client.put(path, content=b"0123456789")).is_success
    assert (await client.put(f"{path}?offset=8", content=b"ABCD")).json()["bytes"] == 4
    assert (await client.put(path, content=b"xy", headers={"Content-Range": "bytes 2-3/*"})).is_success
    assert (await client.get(path)).content == b"01xy4567ABCD"
    for wrong in ("bytes 2-9/*", "bytes 3-2/*", "bytes */9", "lines 1-2/3"):
        refused = await client.put(path, content=b"xy", headers={"Content-Range": wrong})
        assert (refused.status_code, refused.json()["code"]) == (400, "MALFORMED_REQUEST")


async def pieces_of(size: int, *, sent: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    """Yield `size` bytes. With `sent`, set it then, and yield nothing more and no end."""
    block = os.urandom(MIB)
    for at in range(0, size, MIB):
        yield block[: size - at]
    if sent is not None:
        sent.set()
        await asyncio.Event().wait()


async def test_an_unfinished_upload_changes_no_file(
    client: httpx.AsyncClient, session: str, local_streams: LocalStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "KEY_SANDBOX_STREAMS", 2)
    write(local_streams, "old", b"old")
    begun = {name: asyncio.Event() for name in ("old", "new")}
    uploads = [
        asyncio.create_task(client.put(f"{session}/files/{name}", content=pieces_of(20 * MIB, sent=sent)))
        for name, sent in begun.items()
    ]
    await asyncio.gather(*(sent.wait() for sent in begun.values()))
    assert (await client.get(f"{session}/files/old")).status_code == 429
    for upload in uploads:
        upload.cancel()
    await asyncio.wait(uploads)
    await wait_until_streams_end(client, f"{session}/files/old")
    assert [path.name for path in local_streams.workspace.iterdir()] == ["old"]
    assert (await client.get(f"{session}/files/old")).content == b"old"


async def wait_until_streams_end(client: httpx.AsyncClient, path: str) -> None:
    """Wait until the key can open streams again."""

    async def is_free() -> bool:
        return (await client.get(path)).status_code == 200

    await wait_until_async(is_free, SOON_S, "the streams have ended")


async def test_a_large_file_takes_constant_memory(
    client: httpx.AsyncClient, session: str, local_streams: LocalStreams
) -> None:
    size, process = 100 * MIB, psutil.Process()
    assert (await client.put(f"{session}/files/warm", content=pieces_of(4 * MIB))).is_success
    before, highest = process.memory_info().rss, 0

    async def watch() -> None:
        nonlocal highest
        while True:
            highest = max(highest, process.memory_info().rss)
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    put = await client.put(f"{session}/files/large", content=pieces_of(size))
    assert put.json()["bytes"] == size
    count = 0
    async with client.stream("GET", f"{session}/files/large") as stream:
        async for piece in stream.aiter_raw():
            count += len(piece)
    watching.cancel()
    assert count == size
    assert highest - before < 16 * MIB


async def test_a_problem_during_an_upload_is_the_response(
    client: httpx.AsyncClient, session: str, local_streams: LocalStreams
) -> None:
    write(local_streams, "file")
    for path, status, code in (
        ("file/below", 422, "NOT_A_DIRECTORY"),
        ("/proc/1/mem", 403, "PATH_NOT_ALLOWED"),
        ("", 422, "INVALID_ARGUMENTS"),
    ):
        answer = await client.put(f"{session}/files/{path}", content=pieces_of(20 * MIB))
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text


async def test_missing_files_and_folders_are_problems(
    client: httpx.AsyncClient, session: str, local_streams: LocalStreams
) -> None:
    write(local_streams, "a")
    for path, status, code in (
        ("missing", 404, "FILE_NOT_FOUND"),
        (str(local_streams.workspace), 422, "IS_DIRECTORY"),
        ("/proc/1/mem", 403, "PATH_NOT_ALLOWED"),
    ):
        answer = await client.get(f"{session}/files/{path}")
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text


async def test_a_download_that_the_sandbox_cannot_finish_is_cut(
    client: httpx.AsyncClient, session: str, local_streams: LocalStreams
) -> None:
    path = write(local_streams, "shrinks", bytes(40 * MIB))
    async with client.stream("GET", f"{session}/files/shrinks") as stream:
        assert stream.headers["content-length"] == str(40 * MIB)
        os.truncate(path, 1000)
        with pytest.raises(httpx.RemoteProtocolError):
            await stream.aread()


async def test_entries_folders_moves_and_metadata(
    client: httpx.AsyncClient, session: str, local_streams: LocalStreams
) -> None:
    made = await client.post(f"{session}/folders", json={"path": "one/two", "mode": 0o700})
    assert (made.status_code, made.json()["created"], made.json()["entry"]["mode"]) == (201, True, 0o700)
    assert (await client.post(f"{session}/folders", json={"path": "one/two"})).json()["created"] is False
    for name in ("a", "b"):
        assert (await client.put(f"{session}/files/one/two/{name}", content=b"12")).is_success
    moved = await client.post(f"{session}/moves", json={"source": "one/two/b", "target": "one/c"})
    assert (moved.status_code, moved.json()["name"]) == (201, "c")
    stored = await client.put(f"{session}/metadata", json={"path": "one/c", "metadata": {"kind": "test"}})
    assert stored.json()["metadata"] == {"kind": "test"}
    entry = await client.get(f"{session}/entry", params={"path": "one/c"})
    assert FileEntry.model_validate_json(entry.content).metadata == {"kind": "test"}
    listed = await client.get(f"{session}/entries", params={"path": "one", "depth": 2})
    assert listed.headers["content-type"] == "application/x-ndjson"
    entries = [FileEntry.model_validate_json(line) for line in listed.content.splitlines()]
    assert {entry.path.partition("/one/")[2]: entry.type for entry in entries} == {
        "two": "directory",
        "two/a": "file",
        "c": "file",
    }
    for _ in range(2):
        assert (await client.delete(f"{session}/files/one")).status_code == 204
    assert list(local_streams.workspace.iterdir()) == []
    missing = await client.get(f"{session}/entry", params={"path": "one"})
    assert (missing.status_code, missing.json()["code"]) == (404, "FILE_NOT_FOUND")


async def test_ten_thousand_entries_are_listed(
    client: httpx.AsyncClient, session: str, local_streams: LocalStreams
) -> None:
    write(local_streams, "0")
    for number in range(1, 10_000):
        (local_streams.workspace / str(number)).touch()
    lines = (await client.get(f"{session}/entries", params={"path": "."})).text.splitlines()
    assert {json.loads(line)["name"] for line in lines} == {str(number) for number in range(10_000)}


async def test_a_host_without_a_gateway_is_a_problem_with_advice(
    client: httpx.AsyncClient, session: str, local_streams: LocalStreams
) -> None:
    local_streams.refusal = SandboxUnavailable("host h1 has no stream gateway: start it")
    for answer in (
        await client.get(f"{session}/files/a"),
        await client.put(f"{session}/files/a", content=bytes(MIB)),
        await client.get(f"{session}/entries"),
        await client.get(f"{session}/processes"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (503, "SANDBOX_UNAVAILABLE")


async def test_the_session_of_another_tenant_looks_like_an_unknown_session(api: ApiHarness, session: str) -> None:
    requests: list[tuple[str, str, Any]] = [
        ("GET", "/files/x", None),
        ("PUT", "/files/x", None),
        ("DELETE", "/files/x", None),
        ("GET", "/entry?path=x", None),
        ("GET", "/entries", None),
        ("POST", "/folders", {"path": "x"}),
        ("POST", "/moves", {"source": "x", "target": "y"}),
        ("PUT", "/metadata", {"path": "x", "metadata": {}}),
        ("GET", "/processes", None),
        ("POST", "/processes", {"argv": ["true"]}),
        ("GET", "/processes/1", None),
        ("POST", "/processes/1/signal", {"signal": 9}),
        ("POST", "/processes/1/resize", {"cols": 1, "rows": 1}),
        ("POST", "/processes/1/input", {"data": "", "writer": "w"}),
        ("POST", "/processes/1/close_stdin", None),
        ("GET", "/processes/1/wait", None),
        ("GET", "/processes/1/output", None),
    ]
    for method, rest, body in requests:
        answers = [
            await api["rival"].request(method, f"{prefix}{rest}", json=body) for prefix in (session, "/v1/sessions/s2")
        ]
        assert [answer.status_code for answer in answers] == [404, 404], (method, rest)
        assert answers[0].text == answers[1].text


async def test_an_operators_use_is_audited(api: ApiHarness, session: str, local_streams: LocalStreams) -> None:
    assert (await api["acme"].put(f"{session}/files/a", content=b"x")).is_success
    for number, request in enumerate((("GET", "/files/a"), ("GET", "/entries"), ("GET", "/processes")), start=1):
        method, rest = request
        await api["operator"].request(method, f"{session}{rest}", params={"tenant": "acme"})
        found = (await api["operator"].get("/v1/audit", params={"action": "session.use"})).json()["data"]
        assert [entry["actor"]["role"] for entry in found] == ["operator"] * number
    assert {target.actor.role for target in local_streams.targets} == {"tenant", "operator"}


async def test_downloads_that_no_client_reads_are_counted_and_end(
    client: httpx.AsyncClient, session: str, local_streams: LocalStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "KEY_SANDBOX_STREAMS", 2)
    write(local_streams, "large", bytes(40 * MIB))
    path = f"{session}/files/large"
    async with client.stream("GET", path), client.stream("GET", path):
        refused = await client.get(path)
        assert (refused.status_code, refused.json()["code"]) == (429, "TOO_MANY_REQUESTS")
    await wait_until_streams_end(client, path)
