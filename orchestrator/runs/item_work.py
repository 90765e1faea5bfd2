"""Works one claimed run from where its log ends to its outcome."""

import asyncio
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from contract.calls import ToolResult
from contract.errors import OperatorError, ToolFailure
from orchestrator.batches.artifacts import artifact_folder, copy_artifacts
from orchestrator.batches.happenings import CallDone, Happening, ItemReady, StepDone
from orchestrator.batches.items import BatchItem, CallBody, Failure, Outcome, RunLimits
from orchestrator.batches.rows import build_answer_body, build_call_body
from orchestrator.dispatcher import Terms
from orchestrator.events import CallFinished, CallStarted, RunEvent, StepFinished
from orchestrator.homes import new_session_name
from orchestrator.limits import Prices, ReActOptions
from orchestrator.pool_connection import PoolConnection
from orchestrator.run_parts import RunAs, RunParts
from orchestrator.runs.journal import Journal, LoggedModel
from orchestrator.runs.models import Models
from orchestrator.runs.outcomes import judge_call, judge_error, judge_run, status_of
from orchestrator.runs.records import BatchDefaults
from orchestrator.runs.run_queue import Claim
from orchestrator.sessions import Session, SessionInfo, Start
from orchestrator.traces.opening import Traces

Tell = Callable[[Happening], None]
_INFO: TypeAdapter[SessionInfo] = TypeAdapter(SessionInfo)


class ItemWork:
    """Works items of any batch on one pool. `work` gives an outcome whatever happens; it is cancelled when the run is not ours any more."""

    def __init__(self, pool: PoolConnection, parts: RunParts, models: Models, traces: Traces | None) -> None:
        """`traces` None: none are written."""
        self._pool = pool
        self._parts = parts
        self._models = models
        self._traces = traces

    async def work(self, claim: Claim, journal: Journal, defaults: BatchDefaults, tell: Tell) -> Outcome:
        """How the item ended. Its session is closed by then, but when this is cancelled: whoever goes on with the run has it."""
        item, began = claim.record.item, time.monotonic()
        try:
            session = await self._session(claim, journal)
            tell(
                ItemReady(
                    at=time.time(), item=item.custom_id, run=claim.run, attempt=claim.record.attempt, setup_s=time.monotonic() - began
                )
            )
            journal.begin()
            try:
                body, failure = await self._worked(claim, journal, defaults, session, tell)
            finally:
                if not _is_being_cancelled():
                    await self._close(session)
        except Exception as error:  # noqa: BLE001  # the edge of an item: whatever it is, the item has an end, and the batch goes on
            body, failure = None, judge_error(error)
        return _outcome(claim, body, failure)

    async def abandon(self, claim: Claim, journal: Journal) -> None:
        """Have the session of a run that is not gone on with removed, as far as it can be reached."""
        name = journal.opening or (journal.session.session if journal.session is not None else None)
        if name is not None:
            with suppress(OperatorError, ToolFailure):
                await self._pool.dispatcher.abandon_session(claim.tenant, name)

    async def _session(self, claim: Claim, journal: Journal) -> Session:
        """The run's session: the one of its log, or a new one."""
        ground, pool = claim.record.item.ground, self._pool
        if journal.session is not None:
            return Session(pool.dispatcher, pool.blobs, claim.tenant, _INFO.validate_python(journal.session.info))
        if journal.opening is not None:
            await self.abandon(claim, journal)
        name = new_session_name()
        await journal.note_opening(name)
        start = Start(
            image=ground.image,
            workspace=Path(ground.workspace) if ground.workspace is not None else None,
            restore=ground.restore,
            network=ground.network,
        )
        session = await Session.open(pool.dispatcher, pool.blobs, tenant=claim.tenant, start=start, name=name)
        await journal.note_opened(name, _INFO.dump_python(await session.info(), mode="json"))
        return session

    async def _worked(
        self, claim: Claim, journal: Journal, defaults: BatchDefaults, session: Session, tell: Tell
    ) -> tuple[dict[str, Any], Failure | None]:
        """The body of the item's row, and why it is no success."""
        item, artifacts = claim.record.item, None
        if isinstance(item.work, CallBody):
            result = await self._called(claim, journal, item.work, session, tell)
            artifacts = await self._artifacts(item, defaults, session)
            return build_call_body(result, artifacts=artifacts), judge_call(result)
        agent_run, telling = _run_name(claim), _Telling(claim, tell)
        options = _options(item.work.limits, defaults)
        if options.max_wall_s is not None:
            # What the run had used before the process died that worked it.
            options = replace(options, max_wall_s=max(0.001, options.max_wall_s - journal.spent_wall_s))
        chosen = await self._models.get(item.work.model or defaults.model)
        work = item.work
        with ExitStack() as stack:
            on_event = telling.on_event
            if self._traces is not None:
                on_event = stack.enter_context(self._traces.open(claim.tenant, agent_run, on_event)).on_event
            wanted = RunAs(
                run=agent_run,
                dialect=work.dialect or defaults.dialect,
                options=options,
                tools=work.tools,
                tell=on_event,
                terms=Terms(priority="batch"),
                book=journal,
                logged=lambda model: LoggedModel(model, journal, work.sampling),
            )
            agent = await self._parts.build_agent(session, chosen, wanted)
            run = await agent.run(work.instruction, history=[dict(message) for message in work.history])
        artifacts = await self._artifacts(item, defaults, session)
        body = build_answer_body(item.url, run, model=chosen.model.name, created=claim.record.started_at, artifacts=artifacts)
        return body, judge_run(run)

    async def _called(self, claim: Claim, journal: Journal, work: CallBody, session: Session, tell: Tell) -> ToolResult:
        """The one call of an item that is no run."""
        call_id = _run_name(claim)
        known = journal.result_of(call_id)
        if known is not None:
            return known
        telling = _Telling(claim, tell)
        began = time.monotonic()
        terms = Terms(timeout_s=work.timeout_s, priority="batch", run=claim.run, keeps_result=True, may_have_been_sent=journal.is_resumed)
        result = await session.call(work.name, work.arguments, call_id=call_id, terms=terms)
        await journal.note_result(call_id, result)
        self._pool.dispatcher.settle(claim.tenant, call_id)
        telling.call_done(result, time.monotonic() - began)
        return result

    async def _artifacts(self, item: BatchItem, defaults: BatchDefaults, session: Session) -> list[str] | None:
        """The files that the item's line names, copied out; None when it names none."""
        if not item.ground.artifacts or defaults.artifacts is None:
            return None
        target = artifact_folder(Path(defaults.artifacts), item.custom_id)
        with tempfile.TemporaryDirectory(prefix="toolcrew-artifacts-") as folder:
            await session.export(folder)
            copied = await asyncio.to_thread(copy_artifacts, Path(folder), item.ground.artifacts, target)
        return list(copied.paths)

    async def _close(self, session: Session) -> None:
        """An item whose sandbox cannot be removed now has its outcome all the same: the sandbox goes when its time is up."""
        with suppress(OperatorError, ToolFailure):
            await session.close()


class _Telling:
    """Makes happenings of the events of one run."""

    def __init__(self, claim: Claim, tell: Tell) -> None:
        self._item, self._run, self._attempt = claim.record.item.custom_id, claim.run, claim.record.attempt
        self._tell = tell
        self._begun: dict[str, float] = {}

    def on_event(self, event: RunEvent) -> None:
        if isinstance(event, CallStarted):
            self._begun[event.call.id] = time.monotonic()
        elif isinstance(event, CallFinished):
            began = self._begun.pop(event.result.call_id, None)
            self.call_done(event.result, time.monotonic() - began if began is not None else 0.0)
        elif isinstance(event, StepFinished):
            self._tell(
                StepDone(
                    at=event.at,
                    item=self._item,
                    run=self._run,
                    attempt=self._attempt,
                    step=event.step,
                    model_s=event.model_s,
                    prompt_tokens=event.usage.prompt_tokens,
                    completion_tokens=event.usage.completion_tokens,
                )
            )

    def call_done(self, result: ToolResult, seconds: float) -> None:
        """A call has ended."""
        code = result.error_code.value if result.error_code is not None else None
        told = {
            "at": time.time(),
            "item": self._item,
            "run": self._run,
            "attempt": self._attempt,
            "call": result.call_id,
            "tool": result.name,
        }
        self._tell(CallDone.model_validate({**told, "seconds": seconds, "error_code": code, "clocks": result.clocks}))


def _run_name(claim: Claim) -> str:
    """The run of one attempt: ids of calls are made of it, and those of an earlier attempt have been used."""
    return claim.run if claim.record.attempt == 1 else f"{claim.run}-{claim.record.attempt}"


def _options(limits: RunLimits, defaults: BatchDefaults) -> ReActOptions:
    """The item's own limits, else the batch's, else the usual ones."""
    told = {**defaults.limits.model_dump(exclude_none=True), **limits.model_dump(exclude_none=True)}
    if defaults.prompt_price is not None and defaults.completion_price is not None:
        told["prices"] = Prices(defaults.prompt_price, defaults.completion_price)
    return ReActOptions(**told)


def _outcome(claim: Claim, body: dict[str, Any] | None, failure: Failure | None) -> Outcome:
    record = claim.record
    return Outcome(
        custom_id=record.item.custom_id, run=claim.run, status_code=status_of(failure), body=body, failure=failure, attempt=record.attempt
    )


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
