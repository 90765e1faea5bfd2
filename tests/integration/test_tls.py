"""Redis behind TLS. A call works through every client of both sides. A wrong server or a wrong client is refused."""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.support.redis.redis_harness import Server, broker_for, open_counting_pool, open_server
from tests.support.stack.stack import missing
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.calls import ToolCall
from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.contract.names import POOL_WEB
from toolcrew.orchestrator.dispatch.pool_connection import open_pool
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.store.connection import check_connection, check_redis, open_redis

CURVE = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


@dataclass(frozen=True)
class Pair:
    """Paths of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """An authority that signs certificates with the openssl command. `ca`: its own certificate."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            missing("there is no openssl command: apt-get install openssl")
        folder.mkdir()
        self._folder = folder
        self.ca = folder / "ca.pem"
        self._run(f"req -x509 {CURVE} -keyout ca.key -out ca.pem -subj /CN=authority -days 30")

    def issue(self, name: str, names: str = "DNS:localhost,IP:127.0.0.1", days: int = 30) -> Pair:
        """Issue a certificate for these names. A negative number of days gives an expired certificate."""
        self._run(f"req {CURVE} -keyout {name}.key -out {name}.csr -subj /CN={name} -addext subjectAltName={names}")
        signed = f"-CA ca.pem -CAkey ca.key -copy_extensions copyall -days {days}"
        self._run(f"x509 -req -in {name}.csr -out {name}.pem {signed}")
        return Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")

    def _run(self, arguments: str) -> None:
        subprocess.run(["openssl", *arguments.split()], cwd=self._folder, check=True, capture_output=True, timeout=30)


class TlsRelay:
    """A relay that accepts TLS on its own port and forwards the bytes to another port. `client_ca`: the required
    signer of client certificates; None accepts clients without a certificate.
    """

    def __init__(self, pair: Pair, to_port: int, client_ca: Path | None = None) -> None:
        self.port = reserve_port()
        self._to_port = to_port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(pair.certificate, pair.key)
        if client_ca is not None:
            self._context.verify_mode = ssl.CERT_REQUIRED
            self._context.load_verify_locations(client_ca)
        self._listening = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tls-relay", daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._listening.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(10)

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._main = asyncio.current_task() or asyncio.create_task(asyncio.sleep(0))
        # Rejected clients are a purpose of the relay, so their errors are ignored.
        self._loop.set_exception_handler(lambda *_: None)
        async with await asyncio.start_server(self._relay, "127.0.0.1", self.port, ssl=self._context) as server:
            self._listening.set()
            await server.serve_forever()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, back_writer), _pump(back_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # One end has disconnected, so the other end is closed too
    finally:
        writer.close()


@contextlib.contextmanager
def open_relay(pair: Pair, to_port: int, client_ca: Path | None = None) -> Iterator[TlsRelay]:
    """Run a relay and stop it on exit."""
    relay = TlsRelay(pair, to_port, client_ca)
    relay.start()
    try:
        yield relay
    finally:
        relay.stop()


@dataclass(frozen=True)
class Harness:
    server: Server
    authority: Authority
    other_authority: Authority
    server_pair: Pair
    client_pair: Pair


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    folder = tmp_path_factory.mktemp("tls")
    ours, stranger = Authority(folder / "ours"), Authority(folder / "stranger")
    with open_server() as server:
        yield Harness(server, ours, stranger, ours.issue("right"), ours.issue("client"))


def build_broker(harness: Harness, port: int, **files: str) -> BrokerSettings:
    files = {"ssl_ca_certs": str(harness.authority.ca), **files}
    options = urlencode({name: path for name, path in files.items() if path})
    return broker_for(f"rediss://:{harness.server.password}@localhost:{port}/0{'?' if options else ''}{options}")


async def refusals(broker: BrokerSettings) -> list[str]:
    """Return the messages of orchestrator and worker about a Redis that both refuse."""
    client = open_redis(broker)
    try:
        with pytest.raises(BrokerUnavailable) as refused:
            await check_redis(client, broker)
    finally:
        await client.aclose()
    with pytest.raises(BrokerUnavailable) as refused_there:
        check_connection(broker)
    return [str(refused.value), str(refused_there.value)]


async def test_a_call_succeeds_when_both_sides_present_their_certificates(harness: Harness) -> None:
    with (
        open_relay(harness.server_pair, harness.server.port, harness.authority.ca) as relay,
        harness.server.client() as watch,
    ):
        pair = {"ssl_certfile": str(harness.client_pair.certificate), "ssl_keyfile": str(harness.client_pair.key)}
        broker = build_broker(harness, relay.port, **pair)
        with open_counting_pool(broker, broker.redis_url.get_secret_value(), watch) as pool:
            async with open_pool(broker, queue_wait_s=10) as opened:
                call = ToolCall(id="c1", name="append_tool", arguments={"path": str(pool.marks)})
                result = await opened.dispatcher.dispatch(Request(call, "acme", None, POOL_WEB))
            assert result.success, result
            assert pool.acted("c1") == 1


@pytest.mark.parametrize(
    ("names", "days", "word"),
    [("DNS:other.example", 30, "Hostname mismatch"), ("DNS:localhost", -1, "certificate has expired")],
    ids=["another host", "expired"],
)
async def test_an_expired_certificate_or_one_for_another_host_is_refused(
    harness: Harness, names: str, days: int, word: str
) -> None:
    pair = harness.authority.issue(f"wrong{days}", names, days)
    with open_relay(pair, harness.server.port) as relay:
        for message in await refusals(build_broker(harness, relay.port)):
            assert word in message
            assert "name the host of TOOLCREW_REDIS_URL" in message


@pytest.mark.parametrize("authority", ["stranger", None])
async def test_a_certificate_of_an_untrusted_authority_is_refused(harness: Harness, authority: str | None) -> None:
    with open_relay(harness.server_pair, harness.server.port) as relay:
        ca = str(harness.other_authority.ca) if authority else ""
        for message in await refusals(build_broker(harness, relay.port, ssl_ca_certs=ca)):
            assert "CERTIFICATE_VERIFY_FAILED" in message
            assert "ssl_ca_certs" in message


async def test_a_missing_client_certificate_is_reported_with_its_settings(harness: Harness) -> None:
    with open_relay(harness.server_pair, harness.server.port, harness.authority.ca) as relay:
        for message in await refusals(build_broker(harness, relay.port)):
            assert "ssl_certfile" in message


async def test_a_missing_certificate_file_is_reported(harness: Harness, tmp_path: Path) -> None:
    for message in await refusals(build_broker(harness, 1, ssl_ca_certs=str(tmp_path / "none.pem"))):
        assert "ssl_ca_certs" in message or "ssl_certfile" in message


async def test_tls_error_messages_contain_no_password(harness: Harness) -> None:
    with open_relay(harness.server_pair, harness.server.port) as relay:
        for message in await refusals(build_broker(harness, relay.port, ssl_ca_certs=str(harness.other_authority.ca))):
            assert harness.server.password not in message
