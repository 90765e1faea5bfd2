"""The front of previews, between real clients and real programs. Ports of this machine take the place of a sandbox's."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import InvalidStatus

from tests.support.streams.port_streams import LocalPorts
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.previews import PreviewSite, PreviewTicket, new_preview_id, seal_preview_ticket
from toolcrew.contract.signing import SigningKeys
from toolcrew.orchestrator.previews import connection, front
from toolcrew.orchestrator.previews.front import PreviewFront
from toolcrew.orchestrator.streams import Stream, StreamTarget
from toolcrew.store.audit import Actor
from toolcrew.store.previews import Preview

KEYS = SigningKeys.of("s" * 40)
TOKEN, PUBLIC, CLOSED = new_preview_id(), new_preview_id(), new_preview_id()
MIB = 1024 * 1024
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Previews:
    """A front and its client. `target`: the port of the program behind it."""

    def __init__(self, client: httpx.AsyncClient, ports: LocalPorts, address: tuple[str, int]) -> None:
        self.client, self.ports, self.address = client, ports, address

    def host(self, target: int, preview: str = PUBLIC) -> str:
        return f"{target}-{preview}.previews.test"

    async def get(self, target: int, path: str = "/", preview: str = PUBLIC, **fields: str) -> httpx.Response:
        headers = {
            "Host": self.host(target, preview),
            **{name.replace("_", "-"): text for name, text in fields.items()},
        }
        return await self.client.get(path, headers=headers)

    async def send(self, data: bytes) -> bytes:
        """Send bytes on a connection, and return all bytes until its end."""
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(data)
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
        return answer


async def find(preview: str) -> Preview | None:
    actor = Actor(key="k1", role="tenant", tenant="acme")
    records = {
        TOKEN: Preview(tenant="acme", session="s1", access="token", actor=actor),
        PUBLIC: Preview(tenant="acme", session="s1", access="public", actor=actor),
        CLOSED: Preview(tenant="acme", session="closed", access="public", actor=actor),
    }
    return records.get(preview)


@pytest.fixture
async def previews() -> AsyncIterator[Previews]:
    ports = LocalPorts()

    async def open_port(target: StreamTarget, port: int) -> Stream:
        if target.session == "closed":
            raise ToolFailure(ErrorCode.SESSION_NOT_FOUND, "the session is closed")
        return await ports.open(target, port)  # type: ignore[return-value]

    server = await PreviewFront(PreviewSite("https://previews.test"), KEYS, find, open_port).listen("127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=20) as client:
            yield Previews(client, ports, (host, port))


@asynccontextmanager
async def program(handler: Handler) -> AsyncIterator[int]:
    """Run a program that listens on a port, and yield the port."""
    async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
        yield int(server.sockets[0].getsockname()[1])


async def read_head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each request with its head."""
    while head := await reader.readuntil(b"\r\n\r\n"):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%b" % (len(head), head))


def ticket(port: int, preview: str = TOKEN, valid_s: float = 60, keys: SigningKeys = KEYS) -> str:
    return seal_preview_ticket(keys, PreviewTicket(preview=preview, port=port, expires_at=time.time() + valid_s))


async def test_requests_of_one_client_share_a_connection_to_the_program(previews: Previews) -> None:
    async with program(echo) as port:
        answers = [await previews.get(port, f"/{number}?x=1") for number in range(3)]
    assert [answer.text.partition(" HTTP")[0] for answer in answers] == [f"GET /{n}?x=1" for n in range(3)]
    assert len(previews.ports.opened) == 1
    assert previews.ports.targets[0].session == "s1"


async def test_a_request_is_sent_again_when_an_idle_connection_was_closed(previews: Previews) -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await read_head(reader)
        writer.close()

    async with program(once) as port:
        assert [(await previews.get(port)).text for _ in range(3)] == ["ok"] * 3
    assert len(previews.ports.opened) == 3


@pytest.mark.parametrize(
    "host",
    ["previews.test", "8000-x.previews.test", "other.test", "0-{0}.previews.test", "65536-{0}.previews.test",
     "8000-{0}.previews.test.other.test", "8000-{0}.previews.test:81", "8000-{0}.x.previews.test", "127.0.0.1"],
)  # fmt: skip
async def test_an_unknown_host_is_misdirected(previews: Previews, host: str) -> None:
    answer = await previews.client.get("/", headers={"Host": host.format(PUBLIC)})
    assert answer.status_code == 421
    assert previews.ports.opened == []


async def test_only_a_valid_ticket_of_this_port_opens_a_preview(previews: Previews) -> None:
    async with program(echo) as port:
        bad = {
            "none": "",
            "another port": ticket(port + 1),
            "another preview": ticket(port, PUBLIC),
            "expired": ticket(port, valid_s=-1),
            "another secret": ticket(port, keys=SigningKeys.of("t" * 40)),
            "cut": ticket(port)[:-2],
            "not base64": "é" * 40,
        }
        for name, text in bad.items():
            answer = await previews.client.get(
                "/", headers=[(b"Host", previews.host(port, TOKEN).encode()), (b"Toolcrew-Ticket", text.encode())]
            )
            assert answer.status_code == 401, name
        unknown = await previews.get(port, preview=new_preview_id())
        assert (unknown.status_code, unknown.text) == (401, answer.text), "an unknown preview answers alike"
        assert previews.ports.opened == []
        good = await previews.get(port, preview=TOKEN, toolcrew_ticket=ticket(port))
        assert (good.status_code, "ticket" in good.text.lower()) == (200, False)


async def test_a_browser_gets_a_cookie_once_and_the_ticket_leaves_the_address(previews: Previews) -> None:
    async with program(echo) as port:
        sealed = ticket(port)
        address = f"{previews.client.base_url}//evil.test/a?toolcrew_ticket={sealed}&b=1"
        first = await previews.get(port, address, TOKEN, accept="text/html,*/*")
        assert (first.status_code, first.headers["referrer-policy"]) == (302, "no-referrer")
        assert first.headers["location"] == f"https://{previews.host(port, TOKEN)}//evil.test/a?b=1"
        cookie = first.headers["set-cookie"]
        assert cookie.startswith(f"__Host-toolcrew={sealed}; Max-Age=")
        assert cookie.endswith("; Path=/; Secure; HttpOnly; SameSite=Lax")
        second = await previews.get(port, preview=TOKEN, cookie=cookie.partition(";")[0] + "; own=1")
        assert "cookie: own=1\r\n" in second.text
        assert sealed not in second.text
        program_call = await previews.get(port, f"/?toolcrew_ticket={sealed}", TOKEN)
        assert program_call.text.startswith("GET / HTTP/1.1")


async def test_pages_of_other_origins_cannot_use_the_cookie(previews: Previews) -> None:
    async with program(echo) as port:
        cookie, own = f"__Host-toolcrew={ticket(port)}", f"https://{previews.host(port, TOKEN)}"
        codes = [
            (await previews.get(port, preview=TOKEN, cookie=cookie, **fields)).status_code
            for fields in (
                {"origin": own},
                {"origin": f"https://8001-{PUBLIC}.previews.test"},
                {"origin": "null"},
                {"sec_fetch_site": "same-site", "sec_fetch_mode": "no-cors"},
                {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"},
                {"sec_fetch_site": "same-origin", "sec_fetch_mode": "cors"},
            )
        ]
    assert codes == [200, 403, 403, 403, 200, 200]


async def test_a_closed_session_and_a_closed_port_are_bad_gateways(previews: Previews) -> None:
    refused = await previews.get(8000, preview=CLOSED)
    assert (refused.status_code, refused.text.strip()) == (502, "the port cannot be reached [SESSION_NOT_FOUND]")


async def test_a_large_body_passes_in_both_directions_in_constant_memory(previews: Previews) -> None:
    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await read_head(reader)
        total = 0
        if b"content-length: " in head.lower():
            left = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            while total < left:
                total += len(await reader.read(65536))
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Total: %d\r\n\r\n" % total)
        for _ in range(32):
            writer.write(b"100000\r\n" + bytes(MIB) + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async with program(count) as port:
        answer = await previews.client.post("/", headers={"Host": previews.host(port)}, content=bytes(32 * MIB))
    assert (answer.headers["x-total"], len(answer.content)) == (str(32 * MIB), 32 * MIB)


async def test_a_slow_client_slows_the_program_down(previews: Previews) -> None:
    written, stalled = 0, asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.transport.set_write_buffer_limits(MIB)
        try:
            while written < 256 * MIB:
                writer.write(bytes(65536))
                written += 65536
                async with asyncio.timeout(1):
                    await writer.drain()
        except TimeoutError:
            stalled.set()
            writer.transport.abort()

    async with program(flood) as port:
        _, writer = await asyncio.open_connection(*previews.address, limit=1024)
        writer.write(f"GET / HTTP/1.1\r\nHost: {previews.host(port)}\r\n\r\n".encode())
        async with asyncio.timeout(30):
            await stalled.wait()
        writer.transport.abort()
    assert written < 64 * MIB, "the rest are buffers of the kernel"


async def test_events_arrive_while_the_response_goes_on_and_the_program_sees_the_end(previews: Previews) -> None:
    heard, left = asyncio.Event(), asyncio.Event()

    async def events(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
        await heard.wait()
        writer.write(b"data: 2\n\n")
        await reader.read()
        left.set()
        writer.close()

    async with program(events) as port:
        async with previews.client.stream("GET", "/", headers={"Host": previews.host(port)}) as stream:
            pieces = stream.aiter_text()
            assert await anext(pieces) == "data: 1\n\n"
            heard.set()
            assert await anext(pieces) == "data: 2\n\n"
        async with asyncio.timeout(20):
            await left.wait()


async def test_a_web_socket_passes_frames_of_any_size_unchanged(previews: Previews) -> None:
    async def back(socket: ServerConnection) -> None:
        async for message in socket:
            await socket.send(message)

    async with serve(back, "127.0.0.1", 0, max_size=None) as server:
        port = server.sockets[0].getsockname()[1]
        uri = f"ws://{previews.host(port)}/chat"
        async with connect(uri, host=previews.address[0], port=previews.address[1], max_size=None) as socket:
            await socket.send("text")
            assert await socket.recv() == "text"
            await socket.send(bytes(5 * MIB))
            assert await socket.recv() == bytes(5 * MIB)
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://{previews.host(port, TOKEN)}/", host=previews.address[0], port=previews.address[1])
        assert refused.value.response.status_code == 401


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nX: a\r\n b\0\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"",
        b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\nraw",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    ],
)
async def test_an_invalid_answer_is_a_bad_gateway(previews: Previews, answer: bytes) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(answer)
        writer.close()

    async with program(reply) as port:
        assert (await previews.get(port)).status_code == 502


async def test_an_answer_that_ends_too_early_ends_the_connection_of_the_client(previews: Previews) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
        writer.close()

    async with program(reply) as port:
        with pytest.raises(httpx.RemoteProtocolError):
            await previews.get(port)


async def test_bytes_after_an_answer_are_not_the_answer_of_the_next_request(previews: Previews) -> None:
    async def split(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        await reader.read()
        writer.close()

    async with program(split) as port:
        assert [(await previews.get(port)).text for _ in range(2)] == ["ok", "ok"]
    assert len(previews.ports.opened) == 2


async def test_a_hidden_second_request_never_reaches_the_program_as_one(previews: Previews) -> None:
    heads: list[bytes] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await read_head(reader))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with program(note) as port:
        hidden = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"
        head = f"POST /open HTTP/1.1\r\nHost: {previews.host(port)}\r\n".encode()
        for length in (
            b"Content-Length: 0\r\nTransfer-Encoding: chunked",
            b"Transfer-Encoding: chunked\r\nContent-Length: 5",
        ):
            answer = await previews.send(head + length + b"\r\n\r\n0\r\n\r\n" + hidden)
            assert answer.startswith(b"HTTP/1.1 400 ")
        answer = await previews.send(head + b"Content-Length: 0\r\n\r\n" + hidden)
    assert [line.split(b"\r\n")[0] for line in heads] == [b"POST /open HTTP/1.1"]
    assert answer.count(b"HTTP/1.1 ") == 2, "the second one has a host of its own, and is refused"
    assert b" 421 " in answer


async def test_a_client_that_sends_no_head_is_disconnected(previews: Previews, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_WITHIN_S", 0.2)
    assert await previews.send(b"GET / HT") == b""


async def test_a_tenant_has_a_limited_number_of_connections(
    previews: Previews, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "MAX_UPSTREAMS_PER_TENANT", 1)
    begun = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        begun.set()
        await reader.read()
        writer.close()

    async with program(hang) as port:
        first = asyncio.create_task(previews.get(port))
        await begun.wait()
        assert (await previews.get(port)).status_code == 503
        first.cancel()
        await asyncio.wait([first])


async def test_an_idle_connection_makes_room_for_a_new_one(previews: Previews, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "MAX_CONNECTIONS", 1)
    idle, _ = await asyncio.open_connection(*previews.address)
    async with program(echo) as port:
        assert (await previews.get(port)).status_code == 200
    assert await idle.read() == b""
