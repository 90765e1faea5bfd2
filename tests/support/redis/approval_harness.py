"""Approval questions, their senders, their approvers, and question queues on a real Redis."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_spec
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.approvals import digest_call
from toolcrew.contract.calls import ToolCall
from toolcrew.contract.signing import SigningKeys
from toolcrew.orchestrator.approvals import asking
from toolcrew.orchestrator.approvals.approvers import ApprovalRequest
from toolcrew.orchestrator.approvals.asking import build_record
from toolcrew.store.approvals import ApprovalQuestion, ApprovalQueue, Approvers
from toolcrew.store.audit import Actor, Audit, AuditEntry

ADMIN = Actor(key="local", role="admin", name="ada")
ACME = Actor(key="a" * 16, role="tenant", name="ann", tenant="acme")
OTHER = Actor(key="b" * 16, role="tenant", name="bob", tenant="other")
OPERATOR = Actor(key="c" * 16, role="operator", name="op", tenant="other")
SHELL = build_spec("bash_tool", properties={"command": {"type": "string"}}, command_parameter="command")


def build_request(
    command: str = "rm -rf /data",
    *,
    tenant: str = "acme",
    number: int = 1,
    arguments: Mapping[str, Any] | None = None,
    **fields: Any,
) -> ApprovalRequest:
    """Return a question about a command or about other arguments, as the approval gate sends it."""
    call = ToolCall(id=f"run-1-{number}", name="bash_tool", arguments=arguments or {"command": command})
    report = {
        "tenant": tenant,
        "session": "s1",
        "run": "run-1",
        "reason": "it is dangerous",
        "warning": "it removes files",
        **fields,
    }
    return ApprovalRequest(call, SHELL, digest=digest_call(call, tenant, report["session"]), **report)


def build_question(command: str = "rm -rf /data", **fields: Any) -> ApprovalQuestion:
    return build_record(build_request(command, **fields))


@dataclass
class ApprovalHarness:
    """A Redis, with as many question queues of as many processes as a test needs."""

    client: "redis.asyncio.Redis"

    def queue(self, keys: SigningKeys = KEY, approvers: Approvers = "tenant") -> ApprovalQueue:
        return ApprovalQueue(self.client, "d", keys, approvers)

    async def entries(self) -> list[AuditEntry]:
        return [*(await Audit(self.client, "d").read()).entries]

    async def until_pending(self, number: int = 1) -> list[ApprovalQuestion]:
        """Wait until `number` questions are pending and return the pending questions."""
        page = await wait_until_async(
            lambda: self.queue().pending(ADMIN),
            SOON_S,
            f"{number} questions are pending",
            pause_s=0.01,
            accepts=lambda page: len(page.questions) == number,
        )
        return [one.question for one in page.questions]


@asynccontextmanager
async def open_harness(server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApprovalHarness]:
    """Yield a harness on that Redis whose approvers look often."""
    monkeypatch.setattr(asking, "POLL_S", 0.01)
    monkeypatch.setattr(asking, "RETRY_S", 0.01)
    async with redis.asyncio.Redis.from_url(server.url, socket_timeout=5) as client:
        yield ApprovalHarness(client)
