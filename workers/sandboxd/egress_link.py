"""The way from sandboxd to the egress proxy of its host: one connection for each that a sandbox opens, with word of whose it is."""

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONNECT_S = 5.0
_READ_BYTES = 32_768
"""What may wait unread of one connection is twice as much."""

ProxyStreams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def open_proxy(path: Path, preamble: Mapping[str, Any], uids: frozenset[int]) -> ProxyStreams:
    """A connection to the proxy that listens at `path`, the preamble sent: one line of JSON, before the program's own bytes.

    Raises OSError, in words for the operator: nobody listens or answers in time, or whoever does runs under a uid that is not one of `uids`.
    """
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=_READ_BYTES)
    except TimeoutError:
        raise OSError(f"nobody took the connection to {path} in {CONNECT_S:g} s") from None
    uid = _peer_uid(writer)
    if uid not in uids:
        writer.transport.abort()
        raise OSError(f"{path} is served by uid {uid}, which may not be the egress proxy")
    # What waits to be written is counted where it comes from.
    writer.transport.set_write_buffer_limits(high=0)
    writer.write(json.dumps(dict(preamble), separators=(",", ":")).encode("ascii") + b"\n")
    return reader, writer


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)
