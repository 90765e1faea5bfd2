"""`toolcrew doctor` for a deployment's connections: Flower, the API, the model's endpoint and the collector, over
real sockets.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from tests.support.records.builders import KEY
from toolcrew.contract.model_endpoints import ModelEndpoint
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.operations.doctor_links import (
    examine_model,
    examine_model_endpoints,
    examine_pages,
    examine_tracing,
)
from toolcrew.orchestrator.operations.findings import Report
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.store.model_endpoints import ModelEndpoints
from toolcrew.store.secrets import SecretStore


@contextmanager
def serve_reply(status: int, body: bytes = b"{}", location: str = "") -> Iterator[tuple[str, list[str]]]:
    """A server that gives the same reply to every request. Records the requests and their keys."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(f"{self.path} {self.headers.get('Authorization', '')}".strip())
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if location:
                self.send_header("Location", location)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing in tests."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", requests
        finally:
            server.shutdown()
            thread.join()


def settings_of(**fields: Any) -> OrchestratorSettings:
    return OrchestratorSettings.model_validate(fields)


NOT_READY = json.dumps({"ready": False, "checks": {"redis": "not connected yet", "x": "ok"}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "is_good", "message"),
    [
        (200, b"{}", True, "answers"),
        (401, b"", True, "asks for a login"),
        (503, NOT_READY, False, "redis: not connected yet"),
        (503, b"<html>", False, "contains no reason"),
        (404, b"", False, "answers with 404"),
    ],
)
async def test_the_api_readiness_is_reported(status: int, body: bytes, is_good: bool, message: str) -> None:
    report = Report()
    with serve_reply(status, body) as (url, requests):
        await examine_pages(settings_of(page_url=url), report)

    assert requests == ["/readyz"]
    rows = [(row.is_good, message in row.text) for row in report.findings if row.name == "api"]
    assert rows == [(is_good, True)]
    assert report.is_healthy is is_good


MODEL_LIST = json.dumps({"data": [{"id": "m1"}, {"id": "m2"}]}).encode()


@pytest.mark.parametrize(
    ("model", "status", "body", "is_good", "needed", "message"),
    [
        ("m1", 200, MODEL_LIST, True, True, "m1 at http"),
        ("m9", 200, MODEL_LIST, False, False, "it does not list that model"),
        ("m1", 200, b"[]", True, True, "m1 at"),
        ("m1", 401, b"", False, True, "refuses the key"),
        ("m1", 500, b"", False, True, "answers with 500"),
        ("m1", 404, b"", True, True, "m1 at"),
    ],
)
async def test_the_model_endpoint_is_checked_with_a_free_request(
    model: str, status: int, body: bytes, is_good: bool, needed: bool, message: str
) -> None:
    report = Report()
    with serve_reply(status, body) as (url, requests):
        await examine_model(
            settings_of(OPENAI_BASE_URL=f"{url}/v1", OPENAI_API_KEY="key-of-the-model", model=model), report
        )

    assert requests == ["/v1/models Bearer key-of-the-model"]
    assert [(finding.is_good, finding.needed, message in finding.text) for finding in report.findings] == [
        (is_good, needed, True)
    ]
    assert "key-of-the-model" not in json.dumps(report.to_json())


async def test_every_configured_model_endpoint_is_reported(client: "redis.asyncio.Redis") -> None:
    report, endpoints = Report(), ModelEndpoints(client, "d", KEY)
    await SecretStore(client, "d", KEY).set(None, "MODEL_KEY", "key-of-the-model")
    with serve_reply(200, MODEL_LIST) as (url, requests):
        endpoint = ModelEndpoint(base_url=f"{url}/v1", model="m1", secret="MODEL_KEY")
        await endpoints.set("a", endpoint)
        await endpoints.set("b", endpoint.model_copy(update={"base_url": f"http://127.0.0.1:{reserve_port()}/v1"}))
        await endpoints.set("c", endpoint.model_copy(update={"secret": "MISSING"}), "acme")
        await examine_model_endpoints(client, "d", KEY, report)

    assert requests == ["/v1/models Bearer key-of-the-model"]
    rows = {finding.name: (finding.is_good, finding.text) for finding in report.findings}
    assert {name: is_good for name, (is_good, _) in rows.items()} == {
        "model a": True,
        "model acme/c": False,
        "model b": False,
    }
    assert "does not answer" in rows["model b"][1]
    assert "MISSING does not exist" in rows["model acme/c"][1]
    assert "key-of-the-model" not in json.dumps(report.to_json())


async def test_model_secrets_are_not_reported_or_sent_to_a_redirect_target() -> None:
    report = Report()
    with serve_reply(200) as (other, requests), serve_reply(307, location=f"{other}/v1/models") as (url, _):
        for base in (url, f"http://user:geheim@127.0.0.1:{reserve_port()}"):
            settings = settings_of(OPENAI_BASE_URL=f"{base}/v1", OPENAI_API_KEY="key-of-the-model", model="m1")
            await examine_model(settings, report)

    assert requests == []
    assert len(report.findings) == 2
    assert not report.findings[1].is_good
    assert "geheim" not in json.dumps(report.to_json())
    assert "key-of-the-model" not in json.dumps(report.to_json())


async def test_an_unreachable_collector_and_an_invalid_tracing_setting_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOOLCREW_TRACING", "otlp")
    good, report = Report(), Report()
    with serve_reply(200) as (url, _):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        await examine_tracing(settings_of(traces=tmp_path), good)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{reserve_port()}")
    await examine_tracing(settings_of(traces=tmp_path / "not" / "yet"), report)
    monkeypatch.setenv("TOOLCREW_TRACING", "on")
    wrong_setting = Report()
    await examine_tracing(settings_of(traces=Path("/proc/self/traces")), wrong_setting)

    assert [finding.is_good for finding in good.findings] == [True, True]
    assert [(finding.name, finding.is_good) for finding in report.findings] == [("tracing", False), ("traces", True)]
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in report.findings[0].remedy
    assert report.is_healthy
    assert not wrong_setting.is_healthy
