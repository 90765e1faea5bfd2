"""TLS in front of a Redis without TLS: an authority of the test, and a relay that terminates TLS and forwards the
bytes.
"""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.stack import free_port, missing

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
        self.port = free_port()
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
