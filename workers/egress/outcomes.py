"""The outcomes of a connection, as a closed list, and the HTTP answers for clients, in words that a model can act
on.
"""

from enum import StrEnum
from http import HTTPStatus


class EgressOutcome(StrEnum):
    """The outcome of a connection in the log. `allowed`: the connection ended normally."""

    ALLOWED = "allowed"
    BAD_OPENING = "bad_opening"
    BAD_REQUEST = "bad_request"
    HOST_REFUSED = "host_refused"
    PORT_REFUSED = "port_refused"
    ADDRESS_REFUSED = "address_refused"
    TLS_REFUSED = "tls_refused"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    BYTES_SPENT = "bytes_spent"
    SECRETS_TOO_LONG = "secrets_too_long"
    SECRET_RETURNED = "secret_returned"
    UNRESOLVED = "unresolved"
    UNREACHABLE = "unreachable"
    BAD_ANSWER = "bad_answer"
    SLOW_REQUEST = "slow_request"
    IDLE = "idle"
    TOO_LONG = "too_long"
    INTERRUPTED = "interrupted"
    STOPPED = "stopped"


class Refusal(Exception):
    """Ends the connection. `sentence` is for the client, sent as an HTTP answer unless a part of the host's answer was
    already sent.
    """

    def __init__(self, outcome: EgressOutcome, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.outcome = outcome
        self.status = status
        self.sentence = sentence


def refuse(outcome: EgressOutcome, sentence: str) -> Refusal:
    """Return the refusal with status 403: the rules do not allow the request."""
    return Refusal(outcome, HTTPStatus.FORBIDDEN, sentence)


def refuse_bad_request(problem: str) -> Refusal:
    """Return the refusal with status 400: the proxy does not accept the request."""
    return Refusal(EgressOutcome.BAD_REQUEST, HTTPStatus.BAD_REQUEST, f"the request is not accepted: {problem}")


def refuse_exhausted(outcome: EgressOutcome, sentence: str) -> Refusal:
    """Return the refusal with status 429: a quota of the session or its tenant is used up."""
    return Refusal(outcome, HTTPStatus.TOO_MANY_REQUESTS, sentence)


def refuse_bad_gateway(outcome: EgressOutcome, sentence: str) -> Refusal:
    """Return the refusal with status 502: the host cannot be reached."""
    return Refusal(outcome, HTTPStatus.BAD_GATEWAY, sentence)


def build_answer(refusal: Refusal) -> bytes:
    """Return the whole HTTP response. Its body is the sentence of the refusal."""
    body = f"toolcrew egress proxy: {refusal.sentence}\n".encode()
    head = (
        f"HTTP/1.1 {refusal.status.value} {refusal.status.phrase}\r\n"
        f"Content-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\n"
        f"X-Toolcrew-Egress: {refusal.outcome.value}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
