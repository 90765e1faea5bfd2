"""Webhooks from a real web worker to a real receiver."""

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.stack.api_stack import ApiStack
from tests.support.stack.waiting import SOON_S
from toolcrew.orchestrator.operations.ports import reserve_port

pytestmark = pytest.mark.stack

KEY = b"k" * 32
SECRET = "whsec_" + base64.b64encode(KEY).decode()
Received = tuple[dict[str, str], bytes]


@asynccontextmanager
async def open_receiver(port: int, *statuses: int) -> AsyncIterator["asyncio.Queue[Received]"]:
    """Run a receiver that answers with these statuses. The last status is repeated."""
    received: asyncio.Queue[Received] = asyncio.Queue()
    remaining = list(statuses)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head.splitlines()[1:])}
        body = await reader.readexactly(int(headers["content-length"]))
        status = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        writer.write(f"HTTP/1.1 {status} Told\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()
        received.put_nowait((headers, body))

    async with await asyncio.start_server(answer, "127.0.0.1", port):
        yield received


def verify_webhook(headers: dict[str, str], body: bytes) -> dict[str, object]:
    """Check a request as a receiver does under the Standard Webhooks convention, and return its content."""
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    return dict(json.loads(body))


async def test_webhooks_for_ended_batches_and_runs_are_repeated_until_accepted(
    api_stack: ApiStack,
) -> None:
    url = f"http://127.0.0.1:{api_stack.hook_port}/ended"
    async with api_stack.client() as client, open_receiver(api_stack.hook_port, 503, 204) as received:
        line = json.dumps({"id": "a", "tool": "bash_tool", "arguments": {"command": "true"}})
        headers = {"Content-Type": "application/jsonl", "Webhook-Secret": SECRET}
        submitted = await client.post("/v1/batches", content=line, headers=headers, params={"webhook_url": url})
        assert submitted.status_code == 201, submitted.text
        async with asyncio.timeout(SOON_S):
            first, second = await received.get(), await received.get()
        result, again = verify_webhook(*first), verify_webhook(*second)
        assert (result["type"], result["data"]["id"]) == ("batch.ended", submitted.json()["id"])  # type: ignore[index]
        assert again == result
        assert first[0]["webhook-id"] == second[0]["webhook-id"]
        run = await client.post("/v1/runs", json={"instruction": "hello", "webhook": {"url": url, "secret": SECRET}})
        assert run.status_code == 202, run.text
        assert SECRET not in run.text
        async with asyncio.timeout(SOON_S):
            result = verify_webhook(*(await received.get()))
        assert (result["type"], result["data"]["id"]) == ("run.ended", run.json()["id"])  # type: ignore[index]


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/", "https://example.com:22/", "http://db.internal/"])
async def test_a_webhook_that_can_never_be_delivered_is_refused(api_stack: ApiStack, url: str) -> None:
    port = reserve_port()
    async with api_stack.client() as client, open_receiver(port, 204) as received:
        webhook = {"url": url.format(port=port), "secret": SECRET}
        run = await client.post("/v1/runs", json={"instruction": "hello", "webhook": webhook})
        batch = await client.post(
            "/v1/batches",
            content=json.dumps({"id": "a", "tool": "bash_tool", "arguments": {"command": "true"}}),
            headers={"Content-Type": "application/jsonl", "Webhook-Secret": SECRET},
            params={"webhook_url": webhook["url"]},
        )
        assert [(answer.status_code, answer.json()["code"]) for answer in (run, batch)] == [
            (422, "INVALID_ARGUMENTS"),
            (422, "INVALID_ARGUMENTS"),
        ]
        assert received.empty()


@pytest.mark.parametrize("fields", [{"url": "ftp://x", "secret": SECRET}, {"url": "https://x.org", "secret": "weak"}])
async def test_an_invalid_webhook_is_refused(api_stack: ApiStack, fields: dict[str, str]) -> None:
    async with api_stack.client() as client:
        refused = await client.post("/v1/runs", json={"instruction": "hello", "webhook": fields})
        assert refused.status_code == 422
        refused = await client.post(
            "/v1/batches",
            content='{"id": "a", "instruction": "x"}',
            headers={"Content-Type": "application/jsonl", "Webhook-Secret": fields["secret"]},
            params={"webhook_url": fields["url"]},
        )
        assert (refused.status_code, refused.json()["code"]) == (422, "INVALID_ARGUMENTS")
