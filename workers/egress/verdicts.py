"""How a connection ended, and what its client is told: one closed list, and HTTP answers that a model can act on."""

from enum import StrEnum
from http import HTTPStatus


class EgressVerdict(StrEnum):
    """What the log says of a connection. `allowed` is one that ended by itself, whatever came over it."""

    ALLOWED = "allowed"
    BAD_OPENING = "bad_opening"
    BAD_REQUEST = "bad_request"
    HOST_REFUSED = "host_refused"
    PORT_REFUSED = "port_refused"
    ADDRESS_REFUSED = "address_refused"
    TLS_REFUSED = "tls_refused"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    BYTES_SPENT = "bytes_spent"
    UNRESOLVED = "unresolved"
    UNREACHABLE = "unreachable"
    BAD_ANSWER = "bad_answer"
    SLOW_REQUEST = "slow_request"
    IDLE = "idle"
    TOO_LONG = "too_long"
    BROKEN_OFF = "broken_off"
    STOPPED = "stopped"


class Refusal(Exception):
    """The connection ends here. `sentence` is for the client, in HTTP as long as nothing of the host's answer has been
    sent.
    """

    def __init__(self, verdict: EgressVerdict, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.verdict = verdict
        self.status = status
        self.sentence = sentence


def refuse(verdict: EgressVerdict, sentence: str) -> Refusal:
    """403: the rules do not have it."""
    return Refusal(verdict, HTTPStatus.FORBIDDEN, sentence)


def bad_request(what: str) -> Refusal:
    """400: what the client sent is not a request that a proxy takes."""
    return Refusal(EgressVerdict.BAD_REQUEST, HTTPStatus.BAD_REQUEST, f"the request is not accepted: {what}")


def exhausted(verdict: EgressVerdict, sentence: str) -> Refusal:
    """429: a cap of the session or its tenant is reached."""
    return Refusal(verdict, HTTPStatus.TOO_MANY_REQUESTS, sentence)


def bad_gateway(verdict: EgressVerdict, sentence: str) -> Refusal:
    """502: the host cannot be had."""
    return Refusal(verdict, HTTPStatus.BAD_GATEWAY, sentence)


def build_answer(refusal: Refusal) -> bytes:
    """The whole HTTP answer; its body is the sentence."""
    body = f"toolcrew egress proxy: {refusal.sentence}\n".encode()
    head = (
        f"HTTP/1.1 {refusal.status.value} {refusal.status.phrase}\r\n"
        f"Content-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\n"
        f"X-Toolcrew-Egress: {refusal.verdict.value}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
