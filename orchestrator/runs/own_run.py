"""Executes one durable run in the process that starts it, as `toolcrew run` does.

The run is like any other durable run: its log is in Redis, and other programs can follow and cancel it. If this process
dies, an orchestrator of the pool continues the run. There is one difference: a person waits for the run. Therefore it
is never queued, and a failure ends the run instead of delaying it.
"""

import secrets

from toolcrew.contract.run_events import OnEvent
from toolcrew.contract.run_spec import ItemEnvironment, RunBody
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection
from toolcrew.orchestrator.runs.agent_builder import AgentBuilder
from toolcrew.orchestrator.runs.durable_runs import DurableRuns
from toolcrew.orchestrator.runs.event_publisher import RunEventPublisher
from toolcrew.orchestrator.runs.executor import RunExecutor
from toolcrew.orchestrator.runs.models import Models
from toolcrew.orchestrator.runs.run_gate import RunGate
from toolcrew.orchestrator.runs.runner import Runner
from toolcrew.orchestrator.traces.recorder import Traces
from toolcrew.store.batches import BatchDefaults
from toolcrew.store.run_records import DurableRun

_DEFAULTS = BatchDefaults(retries=0)


class _NoWaiting(RunGate):
    """Replacement of RunGate with which no run waits: every error ends its run."""

    def classify(self, error: Exception, own_model: str | None) -> None:
        """Return None: the error ends this run."""


class OwnRuns:
    """Starts runs of a client and executes them in this process."""

    def __init__(
        self,
        settings: OrchestratorSettings,
        pool: PoolConnection,
        builder: AgentBuilder,
        traces: Traces,
        runs: DurableRuns,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._builder = builder
        self._traces = traces
        self._runs = runs

    async def execute(self, tenant: str, body: RunBody, session: str, on_event: OnEvent) -> DurableRun:
        """Start a run in an open session and execute it. Return the run after its end. A cancellation of this method
        cancels the run.

        `on_event` receives every event of the run while this process executes it. Raises the same errors as
        DurableRuns.start.
        """
        token, queue = secrets.token_hex(8), self._runs.queue
        run = await self._runs.start(tenant, body, ItemEnvironment(session=session), token=token)
        claim = await queue.started_claim(tenant, run.id, token)
        client, deployment = self._pool.redis, self._settings.deployment
        async with Models(self._settings, self._pool) as models:
            publisher = RunEventPublisher(client, deployment)
            executor = RunExecutor(
                self._pool,
                self._builder,
                models,
                self._traces,
                publisher,
                (lambda _: on_event,),
                # This program may ask at the terminal.
                approver=self._builder.reviewer.approver,
                priority="interactive",
                gate=_NoWaiting(),
            )
            runner = Runner(client, deployment, queue, executor, publisher, 1, None, run_defaults=_DEFAULTS)
            await runner.run_claimed(claim)
        # A process that was stopped for longer than its lease has lost the run: wait for its end elsewhere.
        async for _ in self._runs.follow(tenant, run.id):
            pass
        return await self._runs.get(tenant, run.id)
