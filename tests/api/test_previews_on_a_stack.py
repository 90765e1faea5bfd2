"""Previews of ports on real workers and sandboxes: over HTTP, over WebSockets, and in a browser."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import pytest
from docker import APIClient
from playwright.async_api import async_playwright
from websockets.asyncio.client import connect

from tests.support.api.api_harness import make_keys
from tests.support.api.page_harness import CHROMIUM
from tests.support.stack.api_stack import ApiStack
from tests.support.stack.service_process import open_service
from tests.support.stack.stack import open_stack
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew import AsyncClient, ErrorCode, ToolFailure
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.orchestrator.sdk.http.async_client import AsyncSession

pytestmark = pytest.mark.stack

SITE = """<!doctype html><title>a page</title><p id=said>nothing</p><script>
const socket = new WebSocket(location.origin.replace('http', 'ws') + '/socket');
socket.onopen = () => socket.send('x'.repeat(100000));
socket.onmessage = async ({data}) => {
  const posted = await fetch('/posted', {method: 'POST', body: 'b'.repeat(200000)});
  document.getElementById('said').textContent = `${data.length} ${await posted.text()} ${location.search}`;
};
</script>"""
PROGRAM = """
import base64, hashlib, http.server, socketserver

class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        size = len(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(f"posted {size} cookies={self.headers.get('Cookie')}".encode())
    def do_GET(self):
        if self.path != "/socket":
            return super().do_GET()
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        head = self.rfile.read(2)
        long = {126: 2, 127: 8}.get(head[1] & 127, 0)
        size = int.from_bytes(self.rfile.read(long), "big") if long else head[1] & 127
        mask, data = self.rfile.read(4), self.rfile.read(size)
        data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))
        self.wfile.write(bytes([head[0], 127]) + len(data).to_bytes(8, "big") + data)
        self.rfile.read(1)
        self.close_connection = True
    def answer(self, data):
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True

Server(("127.0.0.1", 8000), Handler).serve_forever()
"""


@dataclass(frozen=True)
class Deployment:
    """An API with previews. `host`, `port`: where the previews are served."""

    url: str
    key: str
    port: int

    async def get(self, address: str, **headers: str) -> httpx.Response:
        """Get an address, whose name only the listener of previews knows."""
        parts = urlsplit(address)
        async with httpx.AsyncClient(timeout=SOON_S) as client:
            target = f"http://127.0.0.1:{self.port}{parts.path}?{parts.query}"
            return await client.get(target, headers={"Host": parts.netloc, **headers})


@pytest.fixture(scope="module")
def deployment(engine: APIClient) -> Iterator[Deployment]:
    port = reserve_port()
    options = ["--previews-url", f"http://previews.localhost:{port}", "--previews-port", str(port)]
    arguments = ["api", "--concurrency", "0", "--no-traces", *options, "--port"]
    classes = {"TOOLCREW_TENANT_CLASSES": json.dumps({"default": {"previews": "token"}})}
    with open_stack(engine, classes) as stack:
        key = asyncio.run(make_keys(stack.redis_url))["acme"]
        settings = {"TOOLCREW_REDIS_URL": stack.redis_url}
        with open_service(stack.footprint, "previews_serving", settings, arguments) as api:
            yield Deployment(api.url, key, port)


@pytest.fixture
async def session(deployment: Deployment) -> AsyncIterator[AsyncSession]:
    """A session with a program that listens on port 8000."""
    async with AsyncClient(deployment.url, deployment.key) as client:
        opened = await client.sessions.open()
        await opened.files.write("index.html", SITE.encode())
        await opened.files.write("/tmp/program.py", PROGRAM.encode())
        started = await opened.call(
            "bash_tool", {"command": "/opt/toolcrew/bin/python3 /tmp/program.py", "background": True}
        )
        assert started.success, started.error
        yield opened
        if opened.id in [listed.id async for listed in client.sessions.list()]:
            await opened.close()


async def serves(deployment: Deployment, address: str) -> None:
    """Wait until the program listens."""

    async def status() -> int:
        return (await deployment.get(address)).status_code

    await wait_until_async(status, SOON_S, "the program listens", accepts=lambda code: code == 200)


async def test_a_port_is_reached_with_its_ticket_until_the_session_ends(
    deployment: Deployment, session: AsyncSession
) -> None:
    address = await session.expose(8000)
    await serves(deployment, address)
    assert "a page" in (await deployment.get(address)).text
    bare = address.partition("?")[0]
    assert (await deployment.get(bare)).status_code == 401
    other_port = address.replace("//8000-", "//8001-")
    assert (await deployment.get(other_port)).status_code == 401
    closed = await deployment.get(await session.expose(8001))
    assert closed.status_code == 502
    parts = urlsplit(address)
    async with connect(
        f"ws://{parts.netloc}/socket?{parts.query}", host="127.0.0.1", port=deployment.port, max_size=None
    ) as socket:
        await socket.send("text" * 50_000)
        assert await socket.recv() == "text" * 50_000
    await session.close()
    assert (await deployment.get(address)).status_code == 502


async def test_a_browser_opens_the_page_and_keeps_the_ticket(deployment: Deployment, session: AsyncSession) -> None:
    address = await session.expose(8000, ttl_s=600)
    await serves(deployment, address)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page()
        await page.goto(address)
        assert await page.title() == "a page"
        await page.wait_for_function("document.getElementById('said').textContent != 'nothing'")
        assert await page.inner_text("#said") == "100000 posted 200000 cookies=None"
        assert await page.evaluate("document.cookie") == ""
        await page.goto(address.partition("?")[0])
        assert await page.title() == "a page"
        other = await browser.new_context()
        foreign = await other.new_page()
        answer = await foreign.goto(address.partition("?")[0])
        assert answer is not None
        assert answer.status == 401
        await browser.close()


async def test_a_class_without_previews_has_none(api_stack: ApiStack) -> None:
    url, key = api_stack.apis[0].url, api_stack.keys["acme"]
    async with AsyncClient(url, key) as client, await client.sessions.open() as session:
        with pytest.raises(ToolFailure) as refused:
            await session.expose(8000)
    assert refused.value.code is ErrorCode.PERMISSION_DENIED
