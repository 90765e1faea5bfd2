"""Durable runs of a client's tenant."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from toolcrew.contract.access_views import Page
from toolcrew.contract.run_events import OnEvent
from toolcrew.contract.run_spec import ItemEnvironment, RunBody
from toolcrew.contract.run_views import DurableRunState, RunView
from toolcrew.contract.webhooks import Webhook
from toolcrew.orchestrator.operations.views import view_run
from toolcrew.orchestrator.runs.durable_runs import DurableRuns
from toolcrew.orchestrator.runs.own_run import OwnRuns
from toolcrew.store.audit import Actor
from toolcrew.store.run_records import DurableRun, RunPage


class ClientRuns:
    """Starts and reads runs that continue when this program ends. An orchestrator executes them (`toolcrew serve
    batches`, `toolcrew serve api`), and every program of the tenant can follow them. All methods raise like
    DurableRuns, and ToolFailure when the client's key is no longer valid.
    """

    def __init__(
        self,
        runs: DurableRuns,
        own: OwnRuns,
        tenant: Callable[[str | None], Awaitable[str]],
        actor: Callable[[], Awaitable[Actor]],
    ) -> None:
        """Create the runs of a client. `tenant`: returns the given tenant, or that of the client, if the client's key
        is still valid for it. `actor`: returns the user of the client.
        """
        self._runs = runs
        self._own = own
        self._tenant = tenant
        self._actor = actor

    async def start(
        self,
        instruction: RunBody | str,
        *,
        environment: ItemEnvironment | None = None,
        idempotency_key: str | None = None,
        metadata: Mapping[str, str] | None = None,
        priority: int = 0,
        webhook: Webhook | None = None,
    ) -> DurableRun:
        """Queue a run (DurableRuns.start). An instruction alone runs with the orchestrator's model and the tools that
        suit that model. `environment`: the workspace and the image of the run; files are files of the store.
        """
        body = RunBody(instruction=instruction) if isinstance(instruction, str) else instruction
        return await self._runs.start(
            await self._tenant(None),
            body,
            environment or ItemEnvironment(),
            idempotency_key=idempotency_key,
            metadata=metadata,
            priority=priority,
            webhook=webhook,
        )

    async def execute(self, body: RunBody, session: str, on_event: OnEvent) -> DurableRun:
        """Start a run in an open session and execute it in this process. Return the run after its end.

        If this process dies, an orchestrator of the pool continues the run. A cancellation of this method cancels the
        run. `on_event` receives every event of the run.
        """
        return await self._own.execute(await self._tenant(None), body, session, on_event)

    async def fork(self, run: str, *, step: int, n: int = 1, idempotency_key: str | None = None) -> list[DurableRun]:
        """Queue `n` runs that share the first `step` steps of a run with `keep_states`, and continue from the state of
        its session after these steps (DurableRuns.fork).
        """
        return await self._runs.fork(await self._tenant(None), run, step, n, idempotency_key=idempotency_key)

    async def get(self, run: str) -> DurableRun:
        """Return the state of a run with its full answer."""
        return await self._runs.get(await self._tenant(None), run)

    async def list(
        self,
        *,
        cursor: str | None = None,
        limit: int = 50,
        state: DurableRunState | None = None,
        tenant: str | None = None,
    ) -> RunPage:
        """Return one page of runs, the newest first (DurableRuns.list). `tenant` None: the client's tenant."""
        return await self._runs.list(await self._tenant(tenant), cursor=cursor, limit=limit, state=state)

    async def cancel(self, run: str) -> DurableRun:
        """End a run: immediately if it waits, otherwise within 2 s."""
        return await self._runs.cancel(await self._tenant(None), run, actor=await self._actor())

    async def transcript(self, run: str) -> Sequence[dict[str, Any]]:
        """Return the run's messages so far, in the OpenAI wire format."""
        return await self._runs.transcript(await self._tenant(None), run)

    async def follow(self, run: str, after: str = "") -> AsyncIterator[tuple[str, str]]:
        """Yield the run's events as they occur, each as (id, JSON), until the last event (DurableRuns.follow)."""
        async for entry in self._runs.follow(await self._tenant(None), run, after):
            yield entry

    async def stored_events(self, run: str, after: str = "") -> AsyncIterator[tuple[str, str]]:
        """Yield the run's stored events, each as (id, JSON)."""
        async for entry in self._runs.stored_events(await self._tenant(None), run, after):
            yield entry


class ViewedRuns:
    """The runs of a client as the HTTP API shows them (sdk/tenant_client.py: TenantRuns)."""

    def __init__(self, runs: ClientRuns) -> None:
        self._runs = runs

    async def list(
        self, *, cursor: str | None, limit: int, state: DurableRunState | None, tenant: str
    ) -> Page[RunView]:
        page = await self._runs.list(cursor=cursor, limit=limit, state=state, tenant=tenant)
        return Page(data=[view_run(run) for run in page.runs], next_cursor=page.next_cursor)

    async def execute(self, body: RunBody, session: str, on_event: OnEvent) -> DurableRun:
        return await self._runs.execute(body, session, on_event)

    async def get(self, run: str) -> RunView:
        return view_run(await self._runs.get(run))

    async def fork(self, run: str, *, step: int, n: int = 1) -> Sequence[RunView]:
        return [view_run(fork) for fork in await self._runs.fork(run, step=step, n=n)]

    async def cancel(self, run: str) -> RunView:
        return view_run(await self._runs.cancel(run))

    async def transcript(self, run: str) -> Sequence[dict[str, Any]]:
        return await self._runs.transcript(run)

    def follow(self, run: str, after: str = "") -> AsyncIterator[tuple[str, str]]:
        return self._runs.follow(run, after)

    def stored_events(self, run: str, after: str = "") -> AsyncIterator[tuple[str, str]]:
        return self._runs.stored_events(run, after)
