"""Processes of a session over HTTP and WebSockets, on the stream server of the guest without a container."""

import asyncio
import base64
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.conftest import RedisProcess
from tests.support.api.api_harness import ApiHarness
from tests.support.api.local_streams import LocalStreams
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew import AsyncClient
from toolcrew.orchestrator.api import processes, shares, sockets
from toolcrew.orchestrator.streams import Stream

# Before the API starts, whatever the order of a test's arguments.
pytestmark = pytest.mark.usefixtures("local_streams")

LINES = "i=0; while [ $i -lt 20000 ]; do echo line-$i; i=$((i+1)); done"
ALL_LINES = b"".join(b"line-%d\n" % number for number in range(20_000))


@pytest.fixture
def client(api: ApiHarness) -> httpx.AsyncClient:
    return api["acme"]


class Viewer:
    """A client of a WebSocket that collects what it receives."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.events: list[dict[str, Any]] = []
        self.output = bytearray()
        self.errors = bytearray()
        self.position: int | None = None

    async def step(self) -> None:
        """Receive one message. Checks that positions have no gap."""
        message = await asyncio.wait_for(self.socket.recv(), SOON_S)
        if isinstance(message, str):
            self.events.append(json.loads(message))
            if self.position is None:
                self.position = self.events[-1].get("from")
            return
        kind, at = struct.unpack_from(">BQ", message)
        assert at == self.position
        self.position += len(message) - 9
        (self.output if kind == 1 else self.errors).extend(message[9:])

    async def read_until(self, text: bytes) -> None:
        while text not in self.output:
            await self.step()

    async def read_event(self, name: str) -> dict[str, Any]:
        while not self.events or self.events[-1]["event"] != name:
            await self.step()
        return self.events[-1]

    async def read_close_code(self) -> int:
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.step()
        assert self.socket.close_code is not None
        return self.socket.close_code

    async def write(self, position: int, data: bytes) -> None:
        await self.socket.send(struct.pack(">Q", position) + data)


@contextlib.asynccontextmanager
async def attached(
    api: ApiHarness, address: str, headers: Mapping[str, str] | None = None, **query: Any
) -> AsyncIterator[Viewer]:
    if headers is None:
        headers = {"Authorization": f"Bearer {api.keys['acme']}"}
    url = f"{api.url.replace('http', 'ws')}{address}?{urlencode(query)}"
    async with connect(url, additional_headers=headers, max_size=None, compression=None) as socket:
        yield Viewer(socket)


async def start(client: httpx.AsyncClient, session: str, *argv: str, **fields: Any) -> str:
    answer = await client.post(f"{session}/processes", json={"argv": argv, **fields})
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == f"{session}/processes/{answer.json()['process']}"
    return str(answer.headers["location"])


async def test_a_process_is_started_listed_and_awaited(client: httpx.AsyncClient, session: str) -> None:
    path = await start(client, session, "sh", "-c", "echo out; echo err >&2; exit 3", tag="build", env={"A": "b"})
    ended = (await client.get(f"{path}/wait", params={"timeout_s": 20})).json()
    assert (ended["running"], ended["end"]["exit_code"], ended["end"]["signal"]) == (False, 3, None)
    view = (await client.get(path)).json()
    assert (view["argv"][0], view["tag"], view["output_bytes"], view["end"]["exit_code"]) == ("sh", "build", 8, 3)
    assert view in (await client.get(f"{session}/processes")).json()["data"]
    output = await client.get(f"{path}/output", params={"from": 0})
    assert sorted(output.content.splitlines()) == [b"err", b"out"]
    assert (await client.get(f"{path}/output", params={"from": 4})).content == output.content[4:]
    assert (await client.get(f"{path}/output", params={"from": 9})).status_code == 416


async def test_a_process_that_does_not_exist_is_not_found(client: httpx.AsyncClient, session: str) -> None:
    for method, rest, body in (
        ("GET", "", None),
        ("GET", "/wait", None),
        ("GET", "/output", None),
        ("POST", "/signal", {"signal": 9}),
        ("POST", "/resize", {"cols": 1, "rows": 1}),
        ("POST", "/input", {"data": "", "writer": "w"}),
        ("POST", "/close_stdin", None),
    ):
        answer = await client.request(method, f"{session}/processes/77{rest}", json=body)
        assert (answer.status_code, answer.json()["code"]) == (404, "FILE_NOT_FOUND"), rest


async def test_a_program_that_does_not_exist_is_a_problem(client: httpx.AsyncClient, session: str) -> None:
    answer = await client.post(f"{session}/processes", json={"argv": ["no-such-program"]})
    assert (answer.status_code, answer.json()["code"]) == (404, "FILE_NOT_FOUND")
    answer = await client.post(f"{session}/processes", json={"argv": ["true"], "pyt": None})
    assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_ARGUMENTS")


async def test_a_repeated_start_with_a_key_starts_one_process(
    client: httpx.AsyncClient, session: str, redis_server: RedisProcess
) -> None:
    body, headers = {"argv": ["sleep", "60"], "tag": "mine"}, {"Idempotency-Key": "one"}
    first = await client.post(f"{session}/processes", json=body, headers=headers)
    again = await client.post(f"{session}/processes", json=body, headers=headers)
    with redis_server.client() as store:
        # The service died before it stored its response.
        slots = store.keys("*:once:*")
        assert slots
        store.delete(*slots)
    lost = await client.post(f"{session}/processes", json=body, headers=headers)
    other = await client.post(f"{session}/processes", json=body, headers={"Idempotency-Key": "two"})
    assert again.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in lost.headers
    assert first.json() == again.json() == lost.json() != other.json()
    assert len((await client.get(f"{session}/processes")).json()["data"]) == 2


async def test_input_over_http_arrives_once(client: httpx.AsyncClient, session: str) -> None:
    path = await start(client, session, "cat", stdin=True)
    hello = {"data": base64.b64encode(b"hello ").decode(), "writer": "w", "offset": 0}
    for _ in range(2):
        assert (await client.post(f"{path}/input", json=hello)).json() == {"input_offset": 6}
    more = {"data": base64.b64encode(b"lo world").decode(), "writer": "w", "offset": 3}
    assert (await client.post(f"{path}/input", json=more)).json() == {"input_offset": 11}
    assert (await client.post(f"{path}/close_stdin")).status_code == 204
    assert (await client.get(f"{path}/wait")).json()["end"]["exit_code"] == 0
    assert (await client.get(f"{path}/output")).content == b"hello world"


async def test_a_signal_ends_a_process(client: httpx.AsyncClient, session: str) -> None:
    path = await start(client, session, "sleep", "60")
    assert (await client.get(f"{path}/wait", params={"timeout_s": 0})).json() == {"running": True, "end": None}
    assert (await client.post(f"{path}/signal", json={"signal": 9})).status_code == 204
    assert (await client.get(f"{path}/wait")).json()["end"]["signal"] == 9
    for wrong in ({"signal": 65}, {"signal": "KILL"}, {}):
        assert (await client.post(f"{path}/signal", json=wrong)).status_code == 422


async def test_a_terminal_over_a_websocket(api: ApiHarness, client: httpx.AsyncClient, session: str) -> None:
    path = await start(client, session, "sh", pty={"cols": 80, "rows": 24})
    async with attached(api, f"{path}/attach") as viewer:
        opened = await viewer.read_event("opened")
        assert (opened["pty"], opened["input_offset"]) == (True, 0)
        await viewer.write(0, b"stty size\n")
        await viewer.read_until(b"24 80")
        await viewer.socket.send(json.dumps({"resize": {"cols": 132, "rows": 50}}))
        await viewer.socket.send(json.dumps({"ping": 7}))
        assert (await viewer.read_event("pong"))["ping"] == 7
        await viewer.write(10, b"stty size; sleep 60\n")
        await viewer.read_until(b"50 132")
        await viewer.write(30, b"\x03exit 5\n")
        end = await viewer.read_event("end")
        assert end["exit_code"] == 5
        assert await viewer.read_close_code() == 1000


async def test_two_viewers_see_the_same_and_write_both(
    api: ApiHarness, client: httpx.AsyncClient, session: str
) -> None:
    path = await start(client, session, "cat", stdin=True)
    async with attached(api, f"{path}/attach") as one, attached(api, f"{path}/attach", writer="two") as two:
        for viewer, text in ((one, b"from one\n"), (two, b"from two\n")):
            await viewer.read_event("opened")
            await viewer.write(0, text)
            for reader in (one, two):
                await reader.read_until(text)
        for _ in range(2):
            await two.socket.send(json.dumps({"close_stdin": True}))
        for viewer in (one, two):
            assert (await viewer.read_event("end"))["exit_code"] == 0
            assert viewer.output == b"from one\nfrom two\n"


async def test_standard_error_is_told_apart(api: ApiHarness, client: httpx.AsyncClient, session: str) -> None:
    path = await start(client, session, "sh", "-c", "echo out; echo err >&2; kill -15 $$")
    async with attached(api, f"{path}/attach") as viewer:
        end = await viewer.read_event("end")
        assert (end["signal"], bytes(viewer.output), bytes(viewer.errors)) == (15, b"out\n", b"err\n")


async def test_every_byte_arrives_once_over_many_connections(
    api: ApiHarness, client: httpx.AsyncClient, session: str
) -> None:
    path = await start(client, session, "sh", "-c", "read go; " + LINES, stdin=True)
    output, position = b"", 0
    for number in range(4):
        query = {"from": position, "pace": True, "writer": "w"}
        async with attached(api, f"{path}/attach", **query) as viewer:
            if number == 0:
                await viewer.read_event("opened")
                await viewer.write(0, b"go\n")
            while len(viewer.output) < len(ALL_LINES) // 8:
                await viewer.step()
            output, position = output + viewer.output, viewer.position or 0
            viewer.socket.transport.abort()
    async with attached(api, f"{path}/attach", **{"from": position}) as viewer:
        assert (await viewer.read_event("end"))["lost_bytes"] == 0
        assert output + viewer.output == ALL_LINES


async def test_input_that_is_sent_again_over_another_connection_arrives_once(
    api: ApiHarness, client: httpx.AsyncClient, session: str
) -> None:
    path = await start(client, session, "cat", stdin=True)
    text = b"".join(b"%08d" % number for number in range(40_000))
    accepted = 0
    for _ in range(4):
        async with attached(api, f"{path}/attach", writer="w", **{"from": "live"}) as viewer:
            accepted = (await viewer.read_event("opened"))["input_offset"]
            for at in range(accepted, accepted + 50_000, 10_000):
                await viewer.write(at, text[at : at + 10_000])
            # Some of it may still be on its way.
            viewer.socket.transport.abort()
    async with attached(api, f"{path}/attach", writer="w", pace=True) as viewer:
        first = (await viewer.read_event("opened"))["input_offset"]
        assert first >= accepted
        confirmed = first

        async def write_rest() -> None:
            # It overlaps with what has arrived.
            for at in range(max(0, first - 5000), len(text), 10_000):
                await viewer.write(at, text[at : at + 10_000])
            await viewer.socket.send(json.dumps({"close_stdin": True}))

        writing = asyncio.create_task(write_rest())
        await viewer.read_event("end")
        await writing
        confirmed = max([event["position"] for event in viewer.events if event["event"] == "input"], default=first)
        assert len(text) - 65_536 - 32_768 <= confirmed <= len(text) - 65_536
        assert viewer.output == text


async def test_a_process_with_pace_waits_for_its_first_reader(
    api: ApiHarness, client: httpx.AsyncClient, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "HOLD_S", 0.5)
    path = await start(client, session, "head", "-c", "3000000", "/dev/zero", pace=True)
    async with attached(api, f"{path}/attach", pace=True, **{"from": 0}) as viewer:
        assert (await viewer.read_event("end"))["lost_bytes"] == 0
        assert len(viewer.output) == 3_000_000
    left = await start(client, session, "head", "-c", "3000000", "/dev/zero", pace=True)
    assert (await client.get(f"{left}/wait")).json()["end"]["exit_code"] == 0


async def test_a_viewer_that_reads_nothing_does_not_delay_the_process_or_others(
    api: ApiHarness, client: httpx.AsyncClient, session: str
) -> None:
    path = await start(client, session, "sh", "-c", "read go; head -c 30000000 /dev/zero", stdin=True)
    async with attached(api, f"{path}/attach", writer="w") as slow:
        await slow.read_event("opened")
        await slow.write(0, b"go\n")
        assert (await client.get(f"{path}/wait", params={"timeout_s": 60})).json()["end"]["exit_code"] == 0
        assert (await client.get(f"{session}/processes")).status_code == 200


@pytest.mark.parametrize(
    "message",
    [
        b"1234567",
        struct.pack(">Q", 1) + b"gap",
        "{",
        "[]",
        '{"resize": {"cols": 0, "rows": 1}}',
        '{"kill": 1}',
        "[" * 60_000,
    ],
    ids=["half a position", "gap", "half JSON", "list", "size", "unknown", "deep"],
)
async def test_an_invalid_message_ends_the_connection_and_not_the_process(
    api: ApiHarness, client: httpx.AsyncClient, session: str, message: str | bytes
) -> None:
    path = await start(client, session, "cat", stdin=True)
    async with attached(api, f"{path}/attach") as viewer:
        await viewer.socket.send(message)
        assert await viewer.read_close_code() == 4400
        assert viewer.events[-1]["code"] == "INVALID_ARGUMENTS"
    assert (await client.get(path)).json()["end"] is None


async def test_a_message_above_64_kib_ends_the_connection(
    api: ApiHarness, client: httpx.AsyncClient, session: str
) -> None:
    path = await start(client, session, "cat", stdin=True)
    async with attached(api, f"{path}/attach") as viewer:
        await viewer.write(0, bytes(65_536 - 8))
        await viewer.socket.send(bytes(65_537))
        assert await viewer.read_close_code() == 1009
    assert (await client.get(path)).json()["end"] is None


async def test_a_revoked_key_ends_its_connections(
    api: ApiHarness, client: httpx.AsyncClient, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "KEY_CHECK_S", 0.01)
    path = await start(client, session, "cat", stdin=True)
    made = (await api["admin"].post("/v1/tenants/acme/keys", json={"name": "short-lived"})).json()
    async with attached(api, f"{path}/attach", {"Authorization": f"Bearer {made['key']}"}) as viewer:
        await viewer.read_event("opened")
        assert (await api["admin"].delete(f"/v1/tenants/acme/keys/{made['id']}")).status_code == 204
        assert await viewer.read_close_code() == 4401


async def test_fields_that_a_sandbox_adds_reach_no_client(
    api: ApiHarness,
    client: httpx.AsyncClient,
    session: str,
    local_streams: LocalStreams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = await start(client, session, "cat", stdin=True)
    open_stream = local_streams.open

    async def open_hostile(*arguments: Any, **options: Any) -> Stream:
        stream = await open_stream(*arguments, **options)
        stream.opened |= {"event": "end", "socket": None, "number": float("nan")}
        return stream

    monkeypatch.setattr(local_streams, "open", open_hostile)
    async with attached(api, f"{path}/attach") as viewer:
        opened = await viewer.read_event("opened")
    assert opened.keys() == {"event", "process", "pid", "pty", "from", "lost_bytes", "input_offset"}


async def test_who_may_attach(api: ApiHarness, client: httpx.AsyncClient, session: str) -> None:
    path = await start(client, session, "cat", stdin=True)
    number = path.rpartition("/")[2]
    keys = {name: {"Authorization": f"Bearer {key}"} for name, key in api.keys.items()}
    for code, headers, address, query in (
        (4401, {}, path, {}),
        (4401, {"Authorization": "Bearer tc_0123456789abcdef_" + "a" * 43}, path, {}),
        (4401, {}, path, {"key": api.keys["acme"]}),
        (4400, keys["acme"], path, {"key": "x"}),
        (4400, keys["acme"], path, {"from": "middle"}),
        (4404, keys["rival"], path, {}),
        (4404, keys["acme"], f"/v1/sessions/s2/processes/{number}", {}),
        (4404, keys["acme"], f"{session}/processes/77", {}),
        (4400, keys["acme"], f"{session}/processes/x", {}),
        (4400, keys["acme"], f"/v1/sessions/{'s' * 65}/processes/1", {}),
        (4403, keys["rival"], path, {"tenant": "acme"}),
        (4403, {"Origin": "https://evil.test"}, path, {}),
        (4403, {"Origin": "https://evil.test", "Cookie": "toolcrew_login=x"}, path, {}),
        (4403, {"Cookie": "toolcrew_login=x"}, path, {}),
        (4401, {"Origin": api.url, "Cookie": "toolcrew_login=x"}, path, {}),
    ):
        async with attached(api, f"{address}/attach", headers, **query) as viewer:
            assert await viewer.read_close_code() == code, (headers.keys(), address, query)
            assert viewer.events[0]["event"] == "error"
    async with attached(api, f"{path}/attach", keys["operator"], tenant="acme") as viewer:
        await viewer.read_event("opened")
    found = (await api["operator"].get("/v1/audit", params={"action": "session.use"})).json()["data"]
    assert [entry["actor"]["role"] for entry in found] == ["operator"]


async def test_a_page_of_the_site_may_attach_with_its_login(
    api: ApiHarness, client: httpx.AsyncClient, session: str
) -> None:
    path = await start(client, session, "cat", stdin=True)
    login = await api.anonymous.post("/login", data={"key": api.keys["acme"]}, headers={"Origin": api.url})
    cookie = {"Cookie": login.headers["set-cookie"].partition(";")[0]}
    async with attached(api, f"{path}/attach", {**cookie, "Origin": api.url}) as viewer:
        await viewer.read_event("opened")
    for headers in ({"Origin": "https://evil.test"}, {"Origin": "null"}, {}, {"Origin": api.url + "1"}):
        async with attached(api, f"{path}/attach", {**cookie, **headers}) as viewer:
            assert await viewer.read_close_code() == 4403, headers


async def test_too_many_connections_of_a_key_are_refused(
    api: ApiHarness, client: httpx.AsyncClient, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await start(client, session, "cat", stdin=True)
    for limit, code in (("KEY_SANDBOX_STREAMS", 4429), ("TENANT_SANDBOX_STREAMS", 4429), ("SANDBOX_STREAMS", 4503)):
        monkeypatch.setattr(shares, limit, 1)
        async with attached(api, f"{path}/attach") as viewer:
            await viewer.read_event("opened")
            async with attached(api, f"{path}/attach") as second:
                assert await second.read_close_code() == code
        monkeypatch.undo()

        async def can_attach() -> bool:
            async with attached(api, f"{path}/attach") as again:
                return (await again.read_event("opened"))["event"] == "opened"

        await wait_until_async(can_attach, SOON_S, "the connections have ended")


async def test_a_connection_that_is_lost_while_its_input_waits_is_noticed(
    api: ApiHarness, client: httpx.AsyncClient, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolcrew.orchestrator.http import server

    monkeypatch.setattr(shares, "KEY_SANDBOX_STREAMS", 1)
    path = await start(client, session, "sleep", "600", stdin=True)
    async with attached(api, f"{path}/attach") as viewer:
        await viewer.read_event("opened")

        async def flood() -> None:
            for at in range(0, 1 << 30, 60_000):
                await viewer.write(at, bytes(60_000))

        flooding = asyncio.create_task(flood())
        done, _ = await asyncio.wait([flooding], timeout=1.0)
        assert not done
        flooding.cancel()
        viewer.socket.transport.abort()
    assert server.PING_INTERVAL_S == 20.0

    async def can_attach() -> bool:
        async with attached(api, f"{path}/attach") as again:
            await again.step()
            return again.events[0]["event"] == "opened"

    await wait_until_async(can_attach, SOON_S, "the connection has ended")


async def test_changes_of_a_folder_are_sent(api: ApiHarness, client: httpx.AsyncClient, session: str) -> None:
    assert (await client.post(f"{session}/folders", json={"path": "w"})).status_code == 201
    async with attached(api, f"{session}/watch", path="w") as viewer:
        await viewer.read_event("opened")
        assert (await client.put(f"{session}/files/w/a", content=b"x")).is_success
        created = await viewer.read_event("create")
        assert (created["name"], created["entry"]["type"]) == ("a", "file")
        assert (await client.delete(f"{session}/files/w/a")).status_code == 204
        assert (await viewer.read_event("remove"))["name"] == "a"
    async with attached(api, f"{session}/watch", path="missing") as viewer:
        assert await viewer.read_close_code() == 4404


async def test_a_port_is_connected(api: ApiHarness, session: str) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        writer.write(b"bye")
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        content = bytes(range(256)) * 4000
        async with attached(api, f"{session}/ports/{port}") as viewer:
            assert json.loads(await viewer.socket.recv()) == {"event": "opened"}

            async def write() -> None:
                for at in range(0, len(content), 60_000):
                    await viewer.socket.send(content[at : at + 60_000])
                await viewer.socket.send(json.dumps({"close_input": True}))

            writing, received = asyncio.create_task(write()), b""
            while isinstance(message := await viewer.socket.recv(), bytes):
                received += message
            await writing
            assert received == content + b"bye"
            assert await viewer.read_close_code() == 1000
    async with attached(api, f"{session}/ports/{port}") as viewer:
        assert await viewer.read_close_code() >= 4400
    for wrong in ("0", "70000", "x"):
        async with attached(api, f"{session}/ports/{wrong}") as viewer:
            assert await viewer.read_close_code() == 4400


async def test_no_input_follows_its_end(api: ApiHarness, client: httpx.AsyncClient, session: str) -> None:
    path = await start(client, session, "sh", "-c", "cat; sleep 60", stdin=True)
    async with attached(api, f"{path}/attach") as viewer:
        await viewer.write(0, b"all")
        await viewer.socket.send(json.dumps({"close_stdin": True}))
        await viewer.read_until(b"all")
        await viewer.write(3, b"more")
        assert await viewer.read_close_code() == 4400
    assert (await client.get(path)).json()["end"] is None


async def test_the_python_client_reads_every_byte_of_a_fast_process(api: ApiHarness, session: str) -> None:
    async with AsyncClient(api.url, api.keys["acme"]) as client:
        handle = client.sessions.get(session.rpartition("/")[2])
        async with await handle.processes.start(["head", "-c", "3000000", "/dev/zero"]) as process:
            size = sum([len(piece.data) async for piece in process])
            assert (size, process.lost_bytes, (await process.wait()).exit_code) == (3_000_000, 0, 0)
