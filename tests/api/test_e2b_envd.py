"""The API inside E2B's sandboxes, on the real stream server."""

import base64
import gzip
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.support.api.local_streams import LocalStreams, open_local_streams
from toolcrew.orchestrator.e2b.debug_service import build_debug_app
from toolcrew.orchestrator.e2b.envd import Envd
from toolcrew.orchestrator.e2b.sandbox import EnvdSandbox
from toolcrew.orchestrator.streams import StreamTarget
from toolcrew.store.audit import local_actor

STREAM = {"Content-Type": "application/connect+json"}


@pytest.fixture
async def streams() -> AsyncIterator[LocalStreams]:
    async with open_local_streams() as opened:
        yield opened


@pytest.fixture
async def client(streams: LocalStreams) -> AsyncIterator[httpx.AsyncClient]:
    envd = Envd(EnvdSandbox(streams, StreamTarget("acme", "s1", local_actor())))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(build_debug_app(envd))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:49983") as opened:
        yield opened
    envd.close()


async def call(client: httpx.AsyncClient, method: str, **message: Any) -> dict[str, Any]:
    answer = await client.post(f"/{method}", json=message)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def envelope(message: dict[str, Any], flags: int = 0) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


def read_envelopes(content: bytes) -> list[tuple[int, dict[str, Any]]]:
    found = []
    while content:
        flags, size = struct.unpack_from(">BI", content)
        found.append((flags, json.loads(content[5 : 5 + size])))
        content = content[5 + size :]
    return found


async def start(
    client: httpx.AsyncClient, command: str, headers: dict[str, str] | None = None, **more: Any
) -> list[tuple[int, dict[str, Any]]]:
    message = {"process": {"cmd": "/bin/sh", "args": ["-c", command], "cwd": "/tmp"}, "stdin": False, **more}
    answer = await client.post(
        "/process.Process/Start", content=envelope(message), headers={**STREAM, **(headers or {})}
    )
    assert answer.status_code == 200
    return read_envelopes(answer.content)


async def test_a_program_sends_its_output_and_its_end(client: httpx.AsyncClient) -> None:
    events = await start(client, "printf out; printf err >&2; exit 3")
    assert events[0][1]["event"]["start"]["pid"] > 1
    data = [event["event"]["data"] for _, event in events if "data" in event.get("event", {})]
    texts = {kind: base64.b64decode(text) for piece in data for kind, text in piece.items()}
    assert texts == {"stdout": b"out", "stderr": b"err"}
    end = {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"}
    assert events[-2:] == [(0, {"event": {"end": end}}), (2, {})]


async def test_a_program_is_killed_at_its_limit_and_unknown_ones_are_refused(client: httpx.AsyncClient) -> None:
    late = await start(client, "sleep 600", {"Connect-Timeout-Ms": "300"})
    assert (late[-1][0], late[-1][1]["error"]["code"]) == (2, "deadline_exceeded")
    message = {"process": {"cmd": "/no/such/program"}}
    answer = await client.post("/process.Process/Start", content=envelope(message), headers=STREAM)
    ((flags, end),) = read_envelopes(answer.content)
    assert (flags, end["error"]["code"]) == (2, "invalid_argument")


async def test_input_signals_and_lists_reach_a_running_program(
    client: httpx.AsyncClient, streams: LocalStreams
) -> None:
    target = StreamTarget("acme", "s1", local_actor())
    running = await streams.open(target, {"what": "process", "argv": ["cat"], "stdin": True, "tag": "cat"})
    pid = running.opened["pid"]
    listed = await call(client, "process.Process/List")
    assert [(row["pid"], row["tag"], row["config"]["cmd"]) for row in listed["processes"]] == [(pid, "cat", "cat")]
    written = {"process": {"tag": "cat"}, "input": {"stdin": base64.b64encode(b"x" * 60_000).decode()}}
    assert await call(client, "process.Process/SendInput", **written) == {}
    received = b""
    while len(received) < 60_000:
        piece = await running.read()
        assert piece is not None
        received += piece.data
    assert received == b"x" * 60_000
    wrong = await client.post("/process.Process/SendInput", json={**written, "input": {"pty": "eA=="}})
    assert (wrong.status_code, wrong.json()["code"]) == (500, "internal")
    body = envelope({"start": {"process": {"pid": pid}}}) + envelope({"data": {"input": {"stdin": "eQ=="}}})
    assert (await client.post("/process.Process/StreamInput", content=body, headers=STREAM)).status_code == 200
    piece = await running.read()
    assert piece is not None
    assert piece.data == b"y"
    await call(client, "process.Process/SendSignal", process={"pid": pid}, signal="SIGNAL_SIGKILL")
    gone = await client.post("/process.Process/SendSignal", json={"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
    assert (gone.status_code, gone.json()["code"]) == (404, "not_found")
    running.close()


async def test_files_are_written_read_and_described(client: httpx.AsyncClient, streams: LocalStreams) -> None:
    base = str(streams.workspace)
    query = {"path": f"{base}/new/a.bin"}
    content = bytes(range(256)) * 500
    headers = {"Content-Type": "application/octet-stream", "X-Metadata-Author": "me"}
    written = await client.post("/files", params=query, content=content, headers=headers)
    assert written.json() == [
        {"path": f"{base}/new/a.bin", "name": "a.bin", "type": "file", "metadata": {"author": "me"}}
    ]
    assert (await client.get("/files", params=query)).content == content
    part = await client.get("/files", params=query, headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content, part.headers["content-range"]) == (
        206,
        content[10:20],
        f"bytes 10-19/{len(content)}",
    )
    assert (await client.get("/files", params=query, headers={"Range": "bytes=900000-"})).status_code == 416
    entry = (await call(client, "filesystem.Filesystem/Stat", path=f"{base}/new/a.bin"))["entry"]
    assert (entry["type"], entry["size"], entry["permissions"], entry["metadata"]) == (
        "FILE_TYPE_FILE",
        str(len(content)),
        "-rw-r--r--",
        {"author": "me"},
    )
    packed = {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}
    await client.post("/files", params=query, content=gzip.compress(b"small"), headers=packed)
    assert (await client.get("/files", params=query)).content == b"small"
    assert (await call(client, "filesystem.Filesystem/Stat", path=f"{base}/new/a.bin"))["entry"]["metadata"] == {}
    broken = await client.post("/files", params=query, content=b"no gzip", headers=packed)
    assert (broken.status_code, broken.json()["code"]) == (400, 400)
    assert (await client.get("/files", params=query)).content == b"small"
    for path, status in ((f"{base}/missing", 404), (base, 400)):
        assert (await client.get("/files", params={"path": path})).status_code == status


async def test_a_form_writes_several_files(client: httpx.AsyncClient, streams: LocalStreams) -> None:
    base = str(streams.workspace)
    files = [("file", (f"{base}/{name}", data)) for name, data in (("one", b"1" * 100_000), ("b/two", b""))]
    written = await client.post("/files", files=files)
    assert [row["path"] for row in written.json()] == [f"{base}/one", f"{base}/b/two"]
    assert (streams.workspace / "one").read_bytes() == b"1" * 100_000
    assert (streams.workspace / "b" / "two").read_bytes() == b""
    invalid = await client.post("/files", content=b"x", headers={"Content-Type": "multipart/form-data; boundary=b"})
    assert invalid.status_code == 400


async def test_folders_are_listed_moved_watched_and_removed(client: httpx.AsyncClient, streams: LocalStreams) -> None:
    base = str(streams.workspace)
    await call(client, "filesystem.Filesystem/MakeDir", path=f"{base}/a/b")
    again = await client.post("/filesystem.Filesystem/MakeDir", json={"path": f"{base}/a/b"})
    assert (again.status_code, again.json()["code"]) == (409, "already_exists")
    watcher = (await call(client, "filesystem.Filesystem/CreateWatcher", path=f"{base}/a", recursive=True))["watcherId"]
    await client.post("/files", params={"path": f"{base}/a/b/f"}, content=b"1", headers={"Content-Type": "text/plain"})
    events = (await call(client, "filesystem.Filesystem/GetWatcherEvents", watcherId=watcher))["events"]
    assert {event["type"] for event in events} >= {"EVENT_TYPE_CREATE", "EVENT_TYPE_WRITE"}
    assert {event["name"] for event in events} == {"b/f"}
    await call(client, "filesystem.Filesystem/RemoveWatcher", watcherId=watcher)
    (streams.workspace / "a" / "link").symlink_to("b/f")
    entries = (await call(client, "filesystem.Filesystem/ListDir", path=f"{base}/a", depth=2))["entries"]
    assert [(row["name"], row["type"], row.get("symlinkTarget")) for row in entries] == [
        ("b", "FILE_TYPE_DIRECTORY", None),
        ("f", "FILE_TYPE_FILE", None),
        ("link", "FILE_TYPE_FILE", f"{base}/a/b/f"),
    ]
    moved = await call(client, "filesystem.Filesystem/Move", source=f"{base}/a", destination=f"{base}/c/d")
    assert moved["entry"]["path"] == f"{base}/c/d"
    await call(client, "filesystem.Filesystem/Remove", path=f"{base}/c")
    missing = await client.post("/filesystem.Filesystem/Stat", json={"path": f"{base}/c"})
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/filesystem.Filesystem/Stat", b"{", 400),
        ("/filesystem.Filesystem/Stat", b"[" * 100_000, 400),
        ("/filesystem.Filesystem/Stat", b'{"path": 5}', 400),
        ("/filesystem.Filesystem/Stat", b'{"path": "' + b"x" * (5 << 20) + b'"}', 429),
        ("/filesystem.Filesystem/Unknown", b"{}", 404),
        ("/init", b"{}", 404),
        ("/process.Process/StreamInput", b"\0\xff\xff\xff\xff", 400),
        ("/process.Process/SendInput", b"{}", 400),
    ],
)
async def test_hostile_requests_are_refused(client: httpx.AsyncClient, path: str, content: bytes, status: int) -> None:
    assert (await client.post(path, content=content)).status_code == status


async def test_a_name_that_resolves_to_this_machine_is_refused(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).status_code == 204
    assert (await client.get("/health", headers={"Host": "attacker.example"})).status_code == 400
