"""The clients of the HTTP API against a service that fails: what is sent again, what is not, and what users read."""

import json
import operator
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from toolcrew import ApiUnavailable, Client, ErrorCode, ToolClient, ToolFailure
from toolcrew.contract.errors import ConfigError, SandboxUnavailable, ToolcrewError
from toolcrew.orchestrator.sdk.http import client as client_module
from toolcrew.orchestrator.sdk.http.connection import MAX_EVENT_BYTES, EventReader

Answer = tuple[int, dict[str, str], bytes]
EVENTS = {"Content-Type": "text/event-stream"}
RUN: dict[str, object] = {
    "id": "run-1", "tenant": "acme", "state": "queued", "instruction": "x", "model": None, "session": None, "metadata": {},
    "priority": 0, "attempt": 1, "created_at": "2026-11-29T12:00:00Z", "started_at": None, "ended_at": None,
    "forked_from": None, "a_field_of_a_later_release": 1,
}  # fmt: skip


class Service:
    """Gives its answers in order, and repeats the last one. An answer None closes the connection without an answer."""

    def __init__(self, answers: list[Answer | None]) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self._answers = answers
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                service.requests.append((f"{self.command} {self.path}", dict(self.headers), body))
                answer = service.take()
                if answer is None:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
                status, headers, content = answer
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                # Otherwise the client may send its next request on the connection that ends here.
                self.send_header("Connection", "close")
                if "Content-Length" not in headers:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                self.close_connection = True

            do_GET = do_POST = do_PUT = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def take(self) -> Answer | None:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    @contextmanager
    def serving(self) -> Iterator[Client]:
        self._thread.start()
        try:
            with Client(f"http://127.0.0.1:{self._server.server_address[1]}", "tc_key") as client:
                yield client
        finally:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []
    # The module alone: threads of other tests sleep too.
    monkeypatch.setattr(client_module, "time", SimpleNamespace(sleep=pauses.append))
    return pauses


def problem(status: int, code: str, **headers: str) -> Answer:
    return (
        status,
        headers,
        json.dumps({"code": code, "detail": f"what to do about {code}", "nearest": ["near"]}).encode(),
    )


def ok(fields: object) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps(fields).encode()


CHECKPOINT = ok({"id": "c", "bytes": 1, "sha256": "x"})


@pytest.mark.parametrize(
    ("first", "act", "requests"),
    [
        (problem(429, "TOO_MANY_REQUESTS"), lambda client: client.sessions.get("s").checkpoint(), 2),
        (problem(503, "NOT_READY"), lambda client: client.sessions.get("s").checkpoint(), 2),
        (problem(503, "BROKER_UNAVAILABLE"), lambda client: client.sessions.get("s").checkpoint(), 1),
        (problem(500, "INTERNAL"), lambda client: client.sessions.get("s").checkpoint(), 1),
        (None, lambda client: client.sessions.get("s").checkpoint(), 1),
        (None, lambda client: client.sessions.get("s").exec(["x"]), 1),
        (problem(503, "OUTCOME_UNKNOWN"), lambda client: client.sessions.get("s").exec(["x"]), 1),
        (None, lambda client: client.sessions.get("s").run("x"), 1),
        (None, lambda client: client.sessions.get("s").files.read("x"), 2),
        (None, lambda client: client.sessions.get("s").files.write("x", b""), 2),
        (None, lambda client: client.runs.start("x"), 2),
        (problem(503, "BROKER_UNAVAILABLE"), lambda client: client.runs.start("x"), 2),
        (problem(409, "IDEMPOTENCY_IN_PROGRESS"), lambda client: client.runs.start("x"), 2),
        (problem(409, "SESSION_BUSY"), lambda client: client.sessions.get("s").fork(), 1),
        (None, lambda client: client.sessions.open(), 2),
    ],
    ids=[
        "busy",
        "not ready",
        "no redis",
        "bug",
        "checkpoint",
        "exec",
        "exec unknown",
        "call",
        "read",
        "write",
        "run",
        "run no redis",
        "run in progress",
        "fork busy",
        "open",
    ],
)
def test_only_requests_without_a_second_effect_are_sent_again(
    first: Answer | None, act: Callable[[Client], object], requests: int
) -> None:
    service = Service([first, ok({"id": "c", "bytes": 1, "sha256": "x", **RUN})])
    with service.serving() as client:
        if requests == 1:
            with pytest.raises(ToolcrewError):
                act(client)
        else:
            act(client)
    assert len(service.requests) == requests
    keys = {headers.get("Idempotency-Key") for _, headers, _ in service.requests}
    assert len(keys) == 1, "a request that is sent again has the same key"


def test_the_pause_that_the_service_asks_for_is_kept(no_pauses: list[float]) -> None:
    service = Service([problem(429, "RATE_LIMITED", **{"Retry-After": "7"}), CHECKPOINT])
    with service.serving() as client:
        client.sessions.get("s").checkpoint()
    assert no_pauses == [7.0]
    long = Service([problem(429, "RATE_LIMITED", **{"Retry-After": "3600"})])
    with long.serving() as client, pytest.raises(ToolFailure) as limited:
        client.sessions.get("s").checkpoint()
    assert limited.value.code is ErrorCode.RATE_LIMITED
    assert len(long.requests) == 1


@pytest.mark.parametrize(
    ("answer", "kind", "code"),
    [
        (problem(404, "SESSION_NOT_FOUND"), ToolFailure, ErrorCode.SESSION_NOT_FOUND),
        (problem(404, "NOT_FOUND"), ToolFailure, ErrorCode.FILE_NOT_FOUND),
        (problem(422, "A_LATER_CODE"), ToolFailure, ErrorCode.INVALID_ARGUMENTS),
        (problem(503, "SANDBOX_UNAVAILABLE"), SandboxUnavailable, ErrorCode.SANDBOX_UNAVAILABLE),
        ((502, {}, b"<html>Bad Gateway</html>"), ApiUnavailable, ErrorCode.NETWORK_ERROR),
        ((404, {}, b""), ApiUnavailable, ErrorCode.NETWORK_ERROR),
        ((500, {}, b"[" * 100_000), ApiUnavailable, ErrorCode.NETWORK_ERROR),
        ((200, {}, b"<html>Welcome</html>"), ApiUnavailable, ErrorCode.NETWORK_ERROR),
        ((200, {}, b'{"id": 1}'), ApiUnavailable, ErrorCode.NETWORK_ERROR),
        ((302, {"Location": "https://login.example"}, b""), ApiUnavailable, ErrorCode.NETWORK_ERROR),
    ],
)
def test_every_answer_that_is_no_success_is_one_error(answer: Answer, kind: type[Exception], code: ErrorCode) -> None:
    with Service([answer]).serving() as client, pytest.raises(kind) as raised:
        client.runs.cancel("run-1")
    assert raised.value.code is code  # type: ignore[attr-defined]


@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_that_is_too_large_is_not_read_into_memory(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_ANSWER_BYTES", 1_000_000)
    service = Service([(status, {}, bytes(32 * 1024 * 1024))])
    with service.serving() as client:
        tracemalloc.start()
        try:
            with pytest.raises(ApiUnavailable):
                client.sessions.get("s").files.read("x")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 8 * 1024 * 1024


def test_an_interrupted_stream_of_a_run_continues_after_its_last_event() -> None:
    def event(number: int, kind: str) -> bytes:
        return f'id: 1-{number}\nevent: {kind}\ndata: {{"n": {number}}}\n\n'.encode()

    cut = event(1, "StepStarted") + event(2, "CallStarted") + b"id: 1-3\nevent: Call"
    service = Service(
        [
            (200, {**EVENTS, "Content-Length": "100000"}, cut),
            problem(503, "NOT_READY"),
            (200, EVENTS, event(3, "CallFinished") + event(4, "RunEnded")),
        ]
    )
    with service.serving() as client:
        events = list(client.runs.follow("run-1"))
    assert events == [(f"1-{number}", f'{{"n": {number}}}') for number in range(1, 5)]
    assert [headers.get("Last-Event-ID") for _, headers, _ in service.requests] == [None, "1-2", "1-2"]


def test_a_call_whose_stream_ends_early_has_no_result() -> None:
    cut = b'event: output\ndata: {"stream": "stdout", "text": "a"}\n\n'
    pieces: list[tuple[str, str]] = []
    with Service([(200, EVENTS, cut)]).serving() as client, pytest.raises(ApiUnavailable):
        client.sessions.get("s").run("x", on_output=lambda stream, text: pieces.append((stream, text)))
    assert pieces == [("stdout", "a")]


def test_events_are_read_at_any_cut_and_their_size_is_limited() -> None:
    text = ': comment\n\nid: 7\nevent: output\ndata: {"a": "é\U0001f600"}\r\n\r\ndata: one\ndata: two\n\n'.encode()
    for size in range(1, len(text)):
        reader = EventReader()
        events = [event for at in range(0, len(text), size) for event in reader.feed(text[at : at + size])]
        assert [(event.event, event.data, event.id) for event in events] == [
            ("output", '{"a": "é\U0001f600"}', "7"),
            ("message", "one\ntwo", "7"),
        ]
    for piece in (b"x" * 65_536, b"data: " + b"x" * 65_536 + b"\n", b"data:\n" * 10_000):
        endless = EventReader()
        with pytest.raises(ApiUnavailable):
            feed_too_much(endless, piece)


def feed_too_much(reader: EventReader, piece: bytes) -> None:
    for _ in range(MAX_EVENT_BYTES // len(piece) + 2):
        list(reader.feed(piece))


def test_names_cannot_leave_their_place_in_the_address() -> None:
    service = Service([ok(RUN)])
    with service.serving() as client:
        client.sessions.get("../../v1/tenants").files.write("a/../b?c#d%2e", b"")
        client.runs.get("../batches/x?tenant=rival")
        client.runs.get("..")
        client.sessions.get("..").files.write("x", b"")
    assert [request for request, _, _ in service.requests] == [
        "PUT /v1/sessions/..%2F..%2Fv1%2Ftenants/files/a/%2E%2E/b%3Fc%23d%252e",
        "GET /v1/runs/..%2Fbatches%2Fx%3Ftenant%3Drival",
        "GET /v1/runs/%2E%2E",
        "PUT /v1/sessions/%2E%2E/files/x",
    ]


@pytest.mark.parametrize(
    ("url", "key"),
    [("", "tc_key"), ("http://a", ""), ("a.example", "tc_key"), ("http://a", "tc\nX: y"), ("http://a", "é")],
)
def test_a_missing_or_wrong_setting_is_named(url: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLCREW_URL", raising=False)
    monkeypatch.delenv("TOOLCREW_API_KEY", raising=False)
    with pytest.raises(ConfigError):
        Client(url, key)


def test_the_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service([ok(RUN)])
    with service.serving() as named:
        monkeypatch.setenv("TOOLCREW_URL", named.url)
        monkeypatch.setenv("TOOLCREW_API_KEY", "tc_mine")
        with Client() as client:
            run = client.runs.get("run-1")
    assert run.created_at == 1_795_953_600.0
    assert service.requests[0][1]["Authorization"] == "Bearer tc_mine"


HTTP_NAMES = {
    "batch_runs": "batches",
    "budgets": "usage",
    "call_history": "calls.get",
    "delete_checkpoint": "delete_checkpoint",
    "kill_call": "calls.kill",
    "list_calls": "calls.list",
    "own_skills": "skills.install",
    "runs": "runs.start",
    "session": "sessions.get",
    "sessions": "sessions.list",
    "open_session": "sessions.open",
    "skills": "skills.list",
    "tools": "tools",
    "usage": "usage",
    "models": "models",
    "key": "key",
    "approvals": "approvals.list",
}
"""What a tenant uses of ToolClient -> where toolcrew.Client has it."""


def test_what_a_tenant_may_use_exists_over_http() -> None:
    with Client("http://127.0.0.1:1", "key") as client:
        for direct, over_http in HTTP_NAMES.items():
            assert hasattr(ToolClient, direct), direct
            assert operator.attrgetter(over_http)(client) is not None
