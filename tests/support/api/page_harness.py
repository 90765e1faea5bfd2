"""A deployment built directly on a real Redis, with content for all pages, and a real browser."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio
from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Page, Request, Response, async_playwright

from tests.support.api.api_harness import ApiHarness
from tests.support.records.builders import build_spec
from tests.support.redis.approval_harness import build_question
from tests.support.runs.batch_events import Attempt, build_item_events
from tests.support.sandboxd.fake_hosts import build_report
from tests.support.stack.stack import ROOT
from toolcrew.contract.calls import Clocks, KillReport, ToolCall, ToolResult
from toolcrew.contract.names import call_key, catalog_key, host_key, hosts_key, tenant_calls_key
from toolcrew.contract.run_events import (
    CallFinished,
    CallSent,
    CallStarted,
    FailureKind,
    OutputArrived,
    RunStarted,
    StepFinished,
    StepStarted,
    TextArrived,
)
from toolcrew.contract.run_spec import RunBody
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.specs import Catalog, seal_catalog
from toolcrew.contract.tenancy import Budgets
from toolcrew.orchestrator.dialects.model import TokenUsage
from toolcrew.orchestrator.runs.durable_runs import DurableRuns
from toolcrew.orchestrator.runs.event_publisher import RunEventBuffer, RunEventPublisher
from toolcrew.store.api_keys import ApiKeys, NewKey
from toolcrew.store.approvals import ApprovalQuestion, ApprovalQueue
from toolcrew.store.audit import Actor
from toolcrew.store.batches import BatchDefaults, BatchItem, BatchRecord, BatchState, ItemOutcome
from toolcrew.store.run_queue import RunQueue
from toolcrew.store.sessions import SessionStore
from toolcrew.store.tenants import RedisTenants
from toolcrew.store.usage import ReplySpending, UsageStore

CHROMIUM = "/usr/bin/chromium"
FLOWER = "https://flower.test/crew"
SCREENSHOTS = ROOT / "build" / "screenshots"
_ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DEPLOYMENT = "default"
HOSTILE = (
    "<script>window.owned = 1</script></script></pre></textarea><img src=x onerror='window.owned = 2'>"
    '<a href="javascript:window.owned=3" onclick="window.owned=4">x</a>"\'{{ 7 * 7 }}{% raw %}${7*7}'
    "\x1b[31mred\x1b]0;title\x07 \u202eevil\u202c zero\u200bwidth \x00 \ud800 \ufeff &lt;b&gt; --> ]]> "
)
WRITABLE = HOSTILE.replace("\ud800", "\ufffd")
"""The hostile text without characters that JSON cannot carry."""


class World:
    """The data of workers, orchestrators and programs. `redis`: the deployment's own client."""

    def __init__(self, client: "redis.asyncio.Redis", settings: OrchestratorSettings) -> None:
        self.redis = client
        self.settings = settings
        self.approvals = ApprovalQueue(client, DEPLOYMENT, settings.broker().signing_keys())
        self.queue = RunQueue(client, DEPLOYMENT, settings.broker().signing_keys())
        self.tenants = RedisTenants(client, DEPLOYMENT, settings.broker().signing_keys())
        self.durable_runs = DurableRuns(client, DEPLOYMENT, settings.broker().signing_keys(), self.tenants)
        self._keys = ApiKeys(client, DEPLOYMENT, settings.broker().signing_keys())
        self.done = self.rival_run = self.question = self.call = ""
        self.rival_question: ApprovalQuestion | None = None

    async def fill(self) -> None:
        """Create content of tenant acme for every page, with hostile text in every field from outside. Tenant rival
        gets one item of each kind.
        """
        await self.publish("bash_tool", "read_tool", "webfetch_tool")
        await self.report_host("h1", busy=3, sessions=7, sandboxes=9)
        await self.report_host("h2", queue="host.h2.b00t", draining=True, problem=WRITABLE[:400])
        for tenant in ("acme", "rival"):
            await self.open_session(tenant, f"{tenant}-session")
            failed = Attempt(failure=FailureKind.MODEL, code="TIMEOUT", message=WRITABLE)
            await self.submit_batch(tenant, f"{tenant}-batch", WRITABLE[:200], [("good", Attempt()), ("bad", failed)])
        self.question = (await self.ask(WRITABLE, number=90, warning=f"it removes files {WRITABLE}")).id
        self.rival_question = await self.ask("cat secrets", tenant="rival", number=91, run="run-r")
        self.done = await self.add_ended_run(f"Count the files. {WRITABLE}")
        self.call = f"{self.done}-1-1"
        await self.add_call(self.call)
        self.rival_run = await self.add_ended_run("Something of a rival", tenant="rival")
        budgets = Budgets(tokens_per_day=500_000, cost_per_month=9.0)
        await self.tenants.change("acme", lambda policy: policy.model_copy(update={"budgets": budgets}))
        for tenant, tokens in (("acme", 1234), ("rival", 98_765)):
            await UsageStore(self.redis, DEPLOYMENT).count_reply(tenant, "s", ReplySpending(TokenUsage(tokens, 0), 1.5))

    async def add_key(self, tenant: str) -> NewKey:
        return await self._keys.add(tenant, name="a key of a test")

    def actor(self, tenant: str) -> Actor:
        """Return an actor of a tenant."""
        return Actor(key="0" * 16, role="tenant", name="ann", tenant=tenant)

    async def revoke_key(self, key: NewKey) -> None:
        assert await self._keys.revoke(key.id)

    async def publish(self, *names: str) -> None:
        """Publish tools of these names, one of them dangerous."""
        specs = tuple(
            build_spec(name, description=f"The tool {name}.\nIt does more.", dangerous=name == "bash_tool")
            for name in names
        )
        await self.redis.set(
            catalog_key(DEPLOYMENT, "sandbox"),
            seal_catalog(self.settings.broker().signing_keys(), "sandbox", Catalog(tools=specs)),
        )

    async def report_host(self, name: str = "h1", **fields: Any) -> None:
        now = time.time()
        report = build_report(name, **{"started_at": now - 7200, "reported_at": now, **fields})
        await self.redis.zadd(hosts_key(DEPLOYMENT), {report.queue: now})
        await self.redis.set(host_key(DEPLOYMENT, report.queue), report.model_dump_json())

    async def open_session(self, tenant: str, session: str) -> None:
        await SessionStore(self.redis, DEPLOYMENT).open(
            tenant, session, "host.h1.b00t", start="{}", ttl_s=1800, limit=100
        )

    async def add_call(self, call: str, tenant: str = "acme", state: str = "done") -> str:
        """Write the record of a call and return the id of its Celery task."""
        task = f"0123456789ab-{call}.1.{tenant}"
        now = time.time()
        fields: dict[Any, Any] = {
            "state": state,
            "tool": "bash_tool",
            "session": "s1",
            "queue": "host.h1.b00t",
            "holder": "host.h1.b00t/w1",
            "sandbox": "box-1",
        }
        times = {
            "queued_at": now - 3,
            "started_at": now - 2,
            "ended_at": now,
            "attempt": 1,
            "task": task,
            "code": "TIMEOUT",
        }
        await self.redis.hset(call_key(DEPLOYMENT, tenant, call), mapping=fields | times)
        await self.redis.zadd(tenant_calls_key(DEPLOYMENT, tenant), {call: now})
        return task

    async def submit_batch(
        self, tenant: str, batch: str, name: str = "", attempts: Sequence[tuple[str, Attempt]] = ()
    ) -> None:
        """Submit a batch with one item for each story, with the events so far."""
        record = BatchRecord(
            state=BatchState.IN_PROGRESS,
            total=len(attempts),
            sha256="0" * 64,
            concurrency=4,
            defaults=BatchDefaults(),
            created_at=time.time() - 60,
            is_detached=True,
            name=name,
        )
        await self.queue.batches.create(tenant, batch, record)
        items = [
            BatchItem(custom_id=item, line=line, url="/v1/agent/runs", work=RunBody(instruction=f"do {item}"))
            for line, (item, _) in enumerate(attempts, 1)
        ]
        await self.queue.batches.add(tenant, batch, [(f"{batch}-{item.line}", item) for item in items])
        writer = RunEventPublisher(self.redis, DEPLOYMENT)
        for item, attempt in attempts:
            for event in build_item_events(item, attempt, at=time.time() - 60):
                writer.add(tenant, batch, event)
        await writer.flush()

    async def ask(self, command: str, *, tenant: str = "acme", number: int = 1, **fields: Any) -> ApprovalQuestion:
        """Add a call that waits for approval."""
        defaults = {"reason": "no rule allows it", "warning": ""}
        question = build_question(command, tenant=tenant, number=number, **{**defaults, **fields})
        assert await self.approvals.ask(question, "asker", 300.0) is None
        return question

    @asynccontextmanager
    async def open_run(self, instruction: str, tenant: str = "acme") -> AsyncIterator["OpenRun"]:
        """Yield a run that the test executes directly. The run ends on exit."""
        run = await self.durable_runs.start(tenant, RunBody(instruction=instruction))
        claim = next(claim for claim in await self.queue.claim(100) if claim.run == run.id)
        async with RunEventPublisher(self.redis, DEPLOYMENT).open(tenant, run.id, claim.token, 1) as events:
            yield OpenRun(run.id, events)
        body = {
            "answer": f"There are three. {WRITABLE}",
            "stop_reason": "answer",
            "steps": 1,
            "usage": {"prompt_tokens": 1000, "completion_tokens": 20},
            "cost": None,
            "clocks": {"queued_s": 0.01, "sandbox_s": 0.1, "run_s": 30.0, "transfer_s": 0.0},
        }
        outcome = ItemOutcome(custom_id=claim.record.item.custom_id, run=run.id, status_code=200, body=body)
        assert await self.queue.finish(claim, outcome)

    async def add_ended_run(self, instruction: str, tenant: str = "acme") -> str:
        """Add a run that ended after one step, whose call was killed at its limit."""
        async with self.open_run(instruction, tenant) as run_events:
            run_events.begin_step(1)
            run_events.print_output(run_events.send_call(), HOSTILE)
            run_events.finish_call("TIMEOUT")
        return run_events.id


@dataclass
class OpenRun:
    """A run and the events that its holder writes."""

    id: str
    events: RunEventBuffer
    call: ToolCall | None = None

    def begin_step(self, number: int, text: str = f"I look at the files. {HOSTILE}") -> None:
        self.events.on_event(RunStarted(run=self.id, instruction="", model="m", dialect="native"))
        self.events.on_event(StepStarted(run=self.id, step=number))
        self.events.on_event(TextArrived(run=self.id, text=text))

    def send_call(self, arguments: dict[str, Any] | None = None) -> ToolCall:
        fields = {"command": f"ls -la\n{WRITABLE}", "deep": [{"a": [WRITABLE]}]} if arguments is None else arguments
        call = self.call = ToolCall(id=f"{self.id}-1-1", name="bash_tool", arguments=fields)
        self.events.on_event(CallStarted(run=self.id, call=call))
        self.events.on_event(CallSent(run=self.id, call=call))
        return call

    def print_output(self, call: ToolCall, text: str) -> None:
        self.events.on_event(OutputArrived(run=self.id, call_id=call.id, stream="stdout", text=text))

    def finish_call(self, code: str | None = None) -> None:
        assert self.call is not None
        kill = KillReport(signalled=3, survivors=0, method="tree", ms=12.5) if code else None
        fields = {
            "call_id": self.call.id,
            "name": "bash_tool",
            "success": code is None,
            "error_code": code,
            "error": WRITABLE if code else None,
        }
        result = ToolResult.model_validate(
            {**fields, "output": f"total 3\n{WRITABLE}", "kill": kill, "clocks": Clocks(run_s=30)}, strict=False
        )
        self.events.on_event(CallFinished(run=self.id, result=result))
        self.events.on_event(
            StepFinished(run=self.id, step=1, model_s=1.2, usage=TokenUsage(prompt_tokens=1000, completion_tokens=20))
        )


@dataclass
class WatchedPage:
    """A page with its problems: console errors, failed requests, and error responses."""

    page: Page
    problems: list[str] = field(default_factory=list)
    expected: tuple[int, ...] = ()

    def watch(self) -> None:
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("requestfailed", self._on_failed)
        self.page.on("response", self._on_response)

    def _on_console(self, message: ConsoleMessage) -> None:
        is_expected = any(f"status of {status}" in message.text for status in self.expected)
        if message.type in ("error", "warning") and not is_expected:
            self.problems.append(f"{message.type}: {message.text}")

    def _on_failed(self, request: Request) -> None:
        # Requests of a page that were still open when the browser left the page.
        if request.failure != "net::ERR_ABORTED":
            self.problems.append(f"failed: {request.url}: {request.failure}")

    def _on_response(self, response: Response) -> None:
        if response.status >= 400 and response.status not in self.expected:
            self.problems.append(f"{response.status}: {response.url}")


class Visitors:
    """Browsers of users with keys. `api`: the service that serves the pages."""

    def __init__(self, browser: Browser, api: ApiHarness) -> None:
        self.browser = browser
        self.api = api

    @asynccontextmanager
    async def visit(self, key: str | None = None, **options: Any) -> AsyncIterator[WatchedPage]:
        """Open a browser that is logged in with the key of that name, or anonymous without a key. Fails on problems
        of the pages.
        """
        context: BrowserContext = await self.browser.new_context(
            base_url=self.api.url, **{"viewport": {"width": 1200, "height": 800}, **options}
        )
        context.set_default_timeout(30_000)
        try:
            if key is not None:
                answer = await context.request.post(
                    "/login", form={"key": self.api.keys[key]}, headers={"Origin": self.api.url}, max_redirects=0
                )
                assert answer.status == 303
            watched = WatchedPage(await context.new_page())
            watched.watch()
            yield watched
            assert watched.problems == []
        finally:
            await context.close()


async def log_in(page: Page, key: str) -> None:
    """Log in as users do."""
    await page.goto("/login")
    await page.get_by_label("API key").fill(key)
    await page.get_by_role("button", name="Log in").click()
    await page.wait_for_url(lambda url: "/login" not in url)


@asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=list(_ARGS))
        try:
            yield browser
        finally:
            await browser.close()


async def take_picture(page: Page, name: str) -> Path:
    """Take a screenshot of the whole page and keep the file for inspection."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    path = SCREENSHOTS / f"{name}.png"
    await page.screenshot(path=path, full_page=True)
    return path
