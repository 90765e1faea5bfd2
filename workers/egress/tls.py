"""TLS over a stream of the proxy. The quota counts the encrypted bytes."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import TypeVar

from toolcrew.workers.egress.allowances import ConnectionQuota
from toolcrew.workers.egress.limits import CHUNK_BYTES
from toolcrew.workers.egress.streams import Stream

T = TypeVar("T")


class TlsStream:
    """One side of a TLS connection. `hostname` None: the server's side. `first`: bytes that were already received. One
    reader and one writer at a time.
    """

    def __init__(
        self,
        stream: Stream,
        context: ssl.SSLContext,
        quota: ConnectionQuota,
        hostname: str | None = None,
        first: bytes = b"",
    ) -> None:
        self._stream = stream
        self._quota = quota
        self._received = ssl.MemoryBIO()
        self._to_send = ssl.MemoryBIO()
        if first:
            self._received.write(first)
        self._tls = context.wrap_bio(
            self._received, self._to_send, server_side=hostname is None, server_hostname=hostname
        )
        self._sending = asyncio.Lock()

    async def handshake(self) -> None:
        """Do the TLS handshake. The client's side also verifies the certificate. Raises OSError (also ssl.SSLError) and
        Refusal.
        """
        try:
            await self._run(self._tls.do_handshake)
        except ssl.SSLError:
            await self._flush()  # send the TLS alert, which tells the other side the error
            raise

    async def receive(self) -> bytes:
        """Return the next bytes; empty at the end. Raises OSError and Refusal."""
        try:
            return await self._run(lambda: self._tls.read(CHUNK_BYTES))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""

    async def send(self, data: bytes) -> None:
        """Send all of the data. Raises OSError."""
        if data:
            self._tls.write(data)
            await self._flush()

    async def close(self) -> None:
        """Announce the end of the data. Raises OSError."""
        with contextlib.suppress(ssl.SSLError):  # expected when the other side has not announced the end of its data
            self._tls.unwrap()
        await self._flush()

    async def _run(self, step: Callable[[], T]) -> T:
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                await self._flush()
                data = await self._stream.receive(self._quota)
                if data:
                    self._received.write(data)
                else:
                    self._received.write_eof()
            else:
                await self._flush()
                return result

    async def _flush(self) -> None:
        if self._to_send.pending:
            async with self._sending:
                await self._stream.send(self._to_send.read())
