"""The way from sandboxd to the egress proxy of its host: one connection for each that a sandbox opens, with word of whose it is."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.unix_listening import find_peer_uid

CONNECT_S = 5.0
_READ_BYTES = 32_768
"""What may wait unread of one connection is twice as much."""

ProxyStreams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def open_proxy(path: Path | None, preamble: Mapping[str, Any], uids: frozenset[int]) -> ProxyStreams:
    """A connection to the proxy that listens at `path`, the preamble sent: one line of JSON, before the program's own bytes.

    Raises OSError, in words for the operator: there is no proxy (None), and whatever `connect_proxy` raises.
    """
    if path is None:
        raise OSError("a kept session has network egress, and TOOLCREW_EGRESS_SOCKET is not set any more")
    reader, writer = await connect_proxy(path, uids)
    # What waits to be written is counted where it comes from.
    writer.transport.set_write_buffer_limits(high=0)
    writer.write(json.dumps(dict(preamble), separators=(",", ":")).encode("ascii") + b"\n")
    return reader, writer


async def connect_proxy(path: Path, uids: frozenset[int]) -> ProxyStreams:
    """A connection on which nothing was said yet.

    Raises OSError, in words for the operator: nobody listens or answers in time, or whoever does runs under a uid that is not one of `uids`.
    """
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=_READ_BYTES)
    except TimeoutError:
        raise OSError(f"nobody took the connection to {path} in {CONNECT_S:g} s") from None
    uid = find_peer_uid(writer.get_extra_info("socket"))
    if uid not in uids:
        writer.transport.abort()
        raise OSError(f"{path} is served by uid {uid}, which may not be the egress proxy: add it to TOOLCREW_EGRESS_UIDS if it is")
    return reader, writer
