"""MCP servers that keep state in a session over HTTP: all calls of a session of toolcrew share one session at the server,
whichever process runs them, and no other session ever gets it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.mcp.mcp_peers import NOT_FOUND, StatefulServer, build_client, modern, open_raw_peer
from tests.support.web.web_servers import WebServer, answer
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.signing import SigningKeys
from toolcrew.workers.custom.testing import MemoryStates
from toolcrew.workers.mcp.http_server import HttpServer
from toolcrew.workers.mcp.http_sessions import ServerSessions
from toolcrew.workers.mcp.http_tools import HttpSource
from toolcrew.workers.web.limits import Deadline

KEYS = SigningKeys.of("a secret of this test that is long enough")


class Deployment:
    """Workers of one deployment. Each call comes from another process, as in a pool."""

    def __init__(self, web: WebServer) -> None:
        self.url = web.url(host="127.0.0.1")
        self.states = MemoryStates()

    def worker(self) -> HttpServer:
        return build_client(self.url)

    def sessions(self, tenant: str = "acme", session: str = "s") -> ServerSessions:
        return ServerSessions(self.states.open(tenant, session), KEYS, f"{tenant} {session}")

    def source(self) -> HttpSource:
        return HttpSource(self.worker(), self.sessions)

    def call(self, text: str, tenant: str = "acme", session: str = "s") -> str:
        done = self.worker().call_tool("echo", {"text": text}, Deadline(20), self.sessions(tenant, session))
        return str(done.result["content"][0]["text"])


@contextmanager
def open_stateful(server: StatefulServer) -> Iterator[Deployment]:
    with open_raw_peer(server) as web:
        server.web = web
        yield Deployment(web)


def count_requests(deployment: Deployment, server: StatefulServer, method: str) -> int:
    assert server.web is not None
    return sum(json.loads(body).get("method") == method for body in server.web.bodies if body)


def test_all_workers_use_one_session_at_the_server_for_the_calls_of_a_session() -> None:
    with open_stateful(server := StatefulServer()) as deployment:
        assert [deployment.call(text) for text in "abc"] == ["a", "a b", "a b c"]
        assert count_requests(deployment, server, "initialize") == 1
        assert server.web is not None
        assert not any(request.startswith("DELETE") for request in server.web.requests)


def test_no_other_tenant_or_session_gets_the_session_at_the_server() -> None:
    """Attack: the names of tenants and sessions are chosen so that a careless join of them would be the same."""
    with open_stateful(StatefulServer()) as deployment:
        owners = [("acme", "s"), ("acme", "s2"), ("other", "s"), ("acme-s", "x"), ("acme", "s-x")]
        assert [deployment.call(str(number), *owner) for number, owner in enumerate(owners)] == list("01234")


@pytest.mark.parametrize("target", [("other", "s"), ("acme", "s2")])
def test_a_record_that_was_copied_to_another_session_is_not_used(target: tuple[str, str]) -> None:
    """Attack: a program that can write to Redis, but does not have the secret."""
    with open_stateful(StatefulServer()) as deployment:
        deployment.call("secret")
        texts = deployment.states.open("acme", "s")._texts
        deployment.states.open(*target)._texts.update(texts)
        assert deployment.call("mine", *target) == "mine"


def test_the_session_is_not_sent_to_another_address() -> None:
    with open_stateful(StatefulServer()) as deployment, open_stateful(other := StatefulServer()) as elsewhere:
        deployment.call("a")
        other.opened = 7
        elsewhere.states = deployment.states
        assert elsewhere.call("b") == "b"
        assert other.web is not None
        assert not any("s-1" in request for request in other.web.requests)


@pytest.mark.parametrize("kind", NOT_FOUND)
def test_a_session_that_the_server_has_lost_is_opened_again_once_and_the_result_says_so(kind: str) -> None:
    with open_stateful(server := StatefulServer(NOT_FOUND[kind])) as deployment:
        deployment.call("a")
        server.texts.clear()
        done = deployment.worker().call_tool("echo", {"text": "b"}, Deadline(20), deployment.sessions())
        assert (done.is_new, done.result["content"][0]["text"]) == (True, "b")
        assert deployment.call("c") == "b c"
        assert count_requests(deployment, server, "initialize") == 2


@pytest.mark.parametrize("status", [400, 409, 410])
def test_no_other_refusal_counts_as_a_lost_session_whatever_its_words(status: int) -> None:
    text = '{"jsonrpc":"2.0","error":{"code":-32000,"message":"the login session of the user has expired"},"id":null}'
    refused = StatefulServer(lambda: answer(text, status, "application/json"))
    with open_stateful(refused) as deployment:
        deployment.call("a")
        refused.texts.clear()
        with pytest.raises(ToolFailure, match="the login session of the user has expired"):
            deployment.call("b")
        assert count_requests(deployment, refused, "initialize") == 1
        assert count_requests(deployment, refused, "tools/call") == 2


def test_a_server_that_loses_every_session_fails_the_call_and_is_not_asked_without_end() -> None:
    with open_stateful(server := StatefulServer()) as deployment:
        deployment.call("a")
        server.texts = type("Forgetful", (dict,), {"__contains__": lambda *_: False})()
        with pytest.raises(ToolFailure) as failure:
            deployment.call("b")
        assert failure.value.code is ErrorCode.HTTP_ERROR
        assert count_requests(deployment, server, "initialize") == 2


def test_two_first_calls_at_the_same_time_share_the_session_that_was_stored_first() -> None:
    with open_stateful(server := StatefulServer()) as deployment:

        def open_meanwhile() -> None:
            # Another worker opens a session and stores it, while the server answers this one.
            server.at_opening = lambda: None
            deployment.call("first")

        server.at_opening = open_meanwhile
        assert deployment.call("second") == "first second"
        assert deployment.call("third") == "first second third"
        assert server.web is not None
        ended = [request for request in server.web.requests if request.startswith("DELETE")]
        assert len(ended) == 1
        assert "s-2" in ended[0], "the session that was opened in vain is ended"


def test_the_end_of_a_session_ends_its_session_at_the_server_and_no_other() -> None:
    with open_stateful(server := StatefulServer()) as deployment:
        deployment.call("a")
        deployment.call("b", session="s2")
        assert deployment.source().end_session("acme", "s")
        assert not deployment.source().end_session("acme", "s3")
        assert server.web is not None
        ended = [at for at, request in enumerate(server.web.requests) if request.startswith("DELETE")]
        assert [server.web.header("mcp-session-id", at) for at in ended] == ["s-1"]
        assert server.web.header("mcp-protocol-version", ended[0]) == "2025-06-18"


def test_a_server_without_sessions_is_asked_as_before() -> None:
    with open_raw_peer(modern) as web:
        deployment = Deployment(web)
        assert [deployment.call(text) for text in "ab"] == ["a", "b"]
        assert deployment.states.open("acme", "s")._texts == {}


def test_a_server_that_was_replaced_by_a_newer_release_is_greeted_again() -> None:
    state: dict[str, Any] = {"handler": StatefulServer()}
    with open_raw_peer(lambda request: state["handler"](request)) as web:
        state["handler"].web = web
        deployment = Deployment(web)
        deployment.call("a")
        unsupported = {"code": -32022, "message": "no", "data": {"supported": ["2026-07-28"]}}

        def only_modern(request: dict[str, Any]) -> Any:
            if web.header("mcp-protocol-version") != "2026-07-28":
                return {"jsonrpc": "2.0", "id": request.get("id"), "error": unsupported}
            return modern(request)

        state["handler"] = only_modern
        assert deployment.call("b") == "b"
