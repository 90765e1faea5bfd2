"""A host's answer on its way to the client: its head checked and made one that ends the connection."""

import re
from dataclasses import dataclass

from workers.egress.bodies import Body, build_body
from workers.egress.headers import Framing, HeadError, drop_hop_by_hop, parse_framing, split_head
from workers.egress.requests import ProxyRequest

_FIRST_LINE = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?")
_SWITCHING = 101


@dataclass(frozen=True)
class AnswerHead:
    """`head`: what the client is sent. `body`: how to read what follows; None after an interim answer (1xx): another
    head follows.

    `is_chunked`: whether the client is sent the body in chunks.
    """

    status: int
    head: bytes
    body: Body | None
    is_chunked: bool


def parse_answer(head: bytes, request: ProxyRequest, max_lines: int) -> AnswerHead:
    """The head of the answer to `request`. Raises HeadError for what is none of HTTP/1.1."""
    first, headers = split_head(head, max_lines)
    match = _FIRST_LINE.fullmatch(first)
    if match is None:
        raise HeadError("its first line is not that of an HTTP/1.1 answer")
    status = int(match[1])
    if status == _SWITCHING:
        raise HeadError("it switches protocols without having been asked")
    framing, passed = parse_framing(headers), drop_hop_by_hop(headers)
    lines = [b"HTTP/1.1 " + first[9:] + b"\r\n", *(header.line for header in passed)]
    if status < 200:
        return AnswerHead(status, b"".join([*lines, b"\r\n"]), None, False)
    has_body = request.method != "HEAD" and status not in (204, 304)
    body = build_body(framing if has_body else Framing(length=0), is_open=has_body)
    # An end that is only the connection's could not be told from a cut: the client is sent chunks instead.
    is_chunked = has_body and framing.length is None and not request.is_old
    if is_chunked:
        lines.append(b"Transfer-Encoding: chunked\r\n")
    return AnswerHead(status, b"".join([*lines, b"Connection: close\r\n\r\n"]), body, is_chunked)
