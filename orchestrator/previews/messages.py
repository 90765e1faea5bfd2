"""Rules for the heads of messages between clients and sandboxes. Every message is parsed and written anew, so that both
sides of the front see the same beginnings and ends of messages.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import h11

from toolcrew.contract.previews import TICKET_PARAMETER

Header = tuple[bytes, bytes]

TICKET_HEADER = b"toolcrew-ticket"
COOKIE = b"__Host-toolcrew"
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding "
    b"upgrade".split()
)
_NOT_FOR_SANDBOXES = frozenset(
    b"expect forwarded x-forwarded-for x-forwarded-host x-forwarded-port x-forwarded-proto x-real-ip x-access-token "
    b"toolcrew-ticket".split()
)
_NOT_FOR_CLIENTS = frozenset(b"alt-svc clear-site-data strict-transport-security".split())


class RefusedMessage(Exception):
    """A message that could be read in two ways, or that the front does not serve. `status`: of the answer."""

    def __init__(self, status: int, advice: str) -> None:
        super().__init__(advice)
        self.status = status


@dataclass(frozen=True)
class RequestHead:
    """The parts of a request that decide where it goes and who may send it. `target` has no ticket."""

    method: bytes
    target: bytes
    host: str
    headers: Sequence[Header]
    is_upgrade: bool
    tickets: Sequence[str]
    has_query_ticket: bool

    @property
    def is_navigation(self) -> bool:
        """Return whether a browser opens the address as a page."""
        accepts = any(name == b"accept" and b"text/html" in value for name, value in self.headers)
        return accepts and self.method in (b"GET", b"HEAD") and not self.is_upgrade

    def is_from_elsewhere(self, origin: str) -> bool:
        """Return whether a page of another origin sent the request, and not as a navigation."""
        fields = dict(self.headers)
        if (sender := fields.get(b"origin")) is not None:
            return sender != origin.encode()
        site, mode = fields.get(b"sec-fetch-site", b"none"), fields.get(b"sec-fetch-mode")
        return site in (b"same-site", b"cross-site") and mode != b"navigate"


def read_request(request: h11.Request) -> RequestHead:
    """Return the head of a request. Raises RefusedMessage."""
    headers = [(bytes(name), bytes(value)) for name, value in request.headers]
    names = [name for name, _ in headers]
    if not request.target.startswith(b"/"):
        raise RefusedMessage(400, "the target of the request must be a path: send it in origin form")
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
        raise RefusedMessage(400, "the request has two lengths: send Content-Length or Transfer-Encoding")
    if names.count(b"host") != 1:
        raise RefusedMessage(400, "the request needs exactly one Host header")
    target, tickets = _split_tickets(bytes(request.target))
    fields = dict(headers)
    return RequestHead(
        method=bytes(request.method),
        target=target,
        host=fields[b"host"].decode("latin-1").lower(),
        headers=headers,
        is_upgrade=_is_upgrade(bytes(request.method), headers),
        tickets=[*tickets, *_header_tickets(headers)],
        has_query_ticket=bool(tickets),
    )


def build_request(head: RequestHead, scheme: str) -> h11.Request:
    """Return the request that the sandbox gets."""
    headers = [
        (name, value)
        for name, value in _without_hops(head.headers)
        if name not in _NOT_FOR_SANDBOXES and not name.startswith(b"e2b-") and name != b"cookie"
    ]
    cookies = [rest for name, value in head.headers if name == b"cookie" if (rest := _without_ticket(value))]
    headers += [(b"cookie", b"; ".join(cookies))] if cookies else []
    headers += [(b"x-forwarded-host", head.host.encode()), (b"x-forwarded-proto", scheme.encode())]
    if head.is_upgrade:
        headers += [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
    elif any(name == b"transfer-encoding" for name, _ in head.headers):
        headers.append((b"transfer-encoding", b"chunked"))
    return h11.Request(method=head.method, target=head.target, headers=headers)


def build_response(response: h11.Response) -> h11.Response:
    """Return the response that the client gets."""
    return h11.Response(
        status_code=response.status_code, reason=response.reason, headers=_for_clients(response.headers)
    )


def build_switch(response: h11.InformationalResponse) -> h11.InformationalResponse:
    """Return the response after which a WebSocket begins. Raises RefusedMessage for another protocol."""
    if dict(response.headers).get(b"upgrade", b"").lower() != b"websocket":
        raise RefusedMessage(502, "the program in the sandbox switched to another protocol than WebSocket")
    headers = [*_for_clients(response.headers), (b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
    return h11.InformationalResponse(status_code=101, headers=headers, reason=b"Switching Protocols")


def _for_clients(headers: Iterable[Header]) -> list[Header]:
    fields = [(bytes(name), bytes(value)) for name, value in headers]
    # The length that counts is that of the chunks.
    not_kept = {*_NOT_FOR_CLIENTS, *([b"content-length"] if b"transfer-encoding" in dict(fields) else [])}
    return [
        (name, value)
        for name, value in _without_hops(fields)
        if name not in not_kept and not (name == b"set-cookie" and _is_foreign_cookie(value))
    ]


def _without_hops(headers: Sequence[Header]) -> list[Header]:
    """Return the headers that are not about one connection. `Connection` can name more of them."""
    named = {
        token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")
    } - {b"host", b"content-length"}
    return [(name, value) for name, value in headers if name not in _HOP_BY_HOP and name not in named]


def _is_upgrade(method: bytes, headers: Sequence[Header]) -> bool:
    values = [value.strip().lower() for name, value in headers if name == b"upgrade"]
    has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in headers)
    return method == b"GET" and values == [b"websocket"] and not has_body


def _split_tickets(target: bytes) -> tuple[bytes, list[str]]:
    """Return the target without its tickets, and the tickets."""
    path, mark, query = target.partition(b"?")
    start = TICKET_PARAMETER.encode() + b"="
    parts = query.split(b"&")
    tickets = [part.removeprefix(start).decode("latin-1") for part in parts if part.startswith(start)]
    if not tickets:
        return target, []
    rest = b"&".join(part for part in parts if not part.startswith(start))
    return path + (mark + rest if rest else b""), tickets


def _header_tickets(headers: Sequence[Header]) -> list[str]:
    found = [value.decode("latin-1") for name, value in headers if name == TICKET_HEADER]
    for name, value in headers:
        if name == b"cookie":
            found += [text.decode("latin-1") for key, text in _cookies(value) if key == COOKIE]
    return found


def _cookies(value: bytes) -> list[Header]:
    pairs = [pair.strip().partition(b"=") for pair in value.split(b";")]
    return [(key.strip(), text) for key, _, text in pairs]


def _without_ticket(value: bytes) -> bytes:
    """Return a Cookie header without the cookie of the ticket."""
    pairs = [pair.strip() for pair in value.split(b";")]
    return b"; ".join(pair for pair in pairs if pair and pair.partition(b"=")[0].strip() != COOKIE)


def _is_foreign_cookie(value: bytes) -> bool:
    """Return whether a cookie would be sent to other sandboxes, or replaces the cookie of the ticket."""
    pair, *attributes = value.split(b";")
    names = {attribute.partition(b"=")[0].strip().lower() for attribute in attributes}
    return b"domain" in names or pair.partition(b"=")[0].strip() == COOKIE
