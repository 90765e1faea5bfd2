"""Forks of runs: new runs that begin with the first steps of another run's log, each in a session with the state after
these steps.

Invariant: a fork has its own call ids, session and log from its start. Nothing that the fork does can reach a call, a
result or a file of the original run. The original run may end, or be forked again, at any time.

A run with `keep_states` forks its session before each request to the model, and its log names the forks. No call runs
in such a session, so it keeps the state: a disk layer that does not change, without a running sandbox.

The item of a fork names the kept state as the session to fork, and the shared steps of the other run's log. The
orchestrator that claims the fork copies these entries into the fork's own log, and then resumes the fork like any other
run. Copied entries have the call ids of the fork. So a call that is made later gets an id of its own, even if both runs
make it in the same step.
"""

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.plurals import count
from toolcrew.contract.run_events import CallFinished, CallReviewed, ModelReplied, RunEvent, StateKept
from toolcrew.contract.run_spec import ItemEnvironment, RunBody
from toolcrew.contract.session_locations import MAX_FORKS
from toolcrew.orchestrator.dialects.call_ids import build_call_id
from toolcrew.store.batches import BatchDefaults, ForkSource
from toolcrew.store.run_log import RunLog
from toolcrew.store.run_queue import RunClaim, RunQueue
from toolcrew.store.run_records import DurableRun, RunRecord

MAX_TREE_RUNS = 200
"""Limit of the runs in a tree of forks."""
MAX_TREE_DEPTH = 50


def name_attempt(run: str, attempt: int) -> str:
    """Return the run name of an attempt. Call ids derive from this name, so each attempt needs a different name."""
    return run if attempt == 1 else f"{run}-{attempt}"


class StepCopier:
    """Turns the events of a run's first `step` steps into events of `run`. `parent`, `name`: the names of the attempts
    of both runs.

    Events about the session of the other run are left out. The copied steps take no working time of the fork.
    """

    def __init__(self, step: int, parent: str, run: str, name: str) -> None:
        self._step = step
        self._parent = parent
        self._run = run
        self._name = name
        self._steps = 0
        self.is_over = False
        """True after the first event of a later step."""

    def copy(self, event: RunEvent) -> RunEvent | None:
        """Return the next event as an event of the fork; None if the fork does not have it."""
        # Sessions, submissions and artifacts are left out: the fork has its own. `wall_s` is left out, because the
        # limit of a fork's working time counts its own work.
        self._steps += isinstance(event, ModelReplied)
        self.is_over = self._steps > self._step
        match event:
            case _ if self.is_over:
                return None
            case ModelReplied() | StateKept():
                return replace(event, run=self._run, wall_s=0.0)
            case CallReviewed() | CallFinished():
                return _rename_call(replace(event, run=self._run, wall_s=0.0), self._parent, self._name)
            case _:
                return None


def copy_steps(events: Iterable[RunEvent], step: int, parent: str, run: str, name: str) -> list[RunEvent]:
    """Return the events of the first `step` steps as events of `run` (StepCopier)."""
    copier = StepCopier(step, parent, run, name)
    return [copied for event in events if (copied := copier.copy(event)) is not None]


@dataclass(frozen=True)
class SharedSteps:
    """The parts of a log that a plan of forks needs. `states`: the kept states by step. `count`: the number of entries
    that a fork of the step copies. `is_empty`: the log has no entries.
    """

    states: Mapping[int, StateKept]
    count: int
    is_empty: bool


async def read_shared_steps(entries: AsyncIterator[RunEvent], run: str, step: int) -> SharedSteps:
    """Read a log up to its end, with only a page of it in memory. `run`: the name of the attempt."""
    states, count, is_empty, copier = dict[int, StateKept](), 0, True, StepCopier(step, run, run, run)
    async for event in entries:
        is_empty = False
        if isinstance(event, StateKept):
            states[event.step] = event
        count += copier.copy(event) is not None
    return SharedSteps(states, count, is_empty)


def _rename_call(event: CallReviewed | CallFinished, parent: str, name: str) -> RunEvent:
    """Return the event with the call id that the call has in the fork."""

    def rename(record: Any, field: str) -> Any:
        return record and record.model_copy(update={field: _rename(getattr(record, field), parent, name)})

    if isinstance(event, CallFinished):
        return replace(event, result=rename(event.result, "call_id"))
    return replace(
        event,
        call_id=_rename(event.call_id, parent, name),
        approved=rename(event.approved, "id"),
        refused=rename(event.refused, "call_id"),
    )


def _rename(call_id: str, parent: str, name: str) -> str:
    _, step, index = call_id.rsplit("-", 2)
    assert call_id == build_call_id(parent, int(step), int(index)), "a run makes only calls with its own ids"
    return build_call_id(name, int(step), int(index))


async def load_copied_steps(queue: RunQueue, claim: RunClaim, run_log: RunLog) -> None:
    """Copy the shared steps into the log of a fork, if the log does not have them yet.

    Raises BrokerUnavailable, RunTaken. Raises ConfigError: the other run's log is no longer stored.
    """
    # The process that executes the fork copies the entries, because only that process may append to the log. The item
    # names the entries, so the fork does not depend on the program that started it.
    source = claim.record.item.forked_from
    if source is None or len(run_log.entries) >= source.entries:
        return
    names = name_attempt(source.run, source.attempt), name_attempt(claim.run, claim.record.attempt)
    try:
        # The log is read twice, a page at a time: the process holds only the copy, which the fork needs.
        record, entries = await queue.runs.open_log(claim.tenant, source.run, batch=None)
        shared = await read_shared_steps(entries, names[0], source.step)
        # The original run was retried, or a part of its log has expired. Refuse to fork from fewer steps than the
        # client has requested.
        if record.attempt != source.attempt or shared.count != source.entries:
            raise _build_expired_error(source)
        _, entries = await queue.runs.open_log(claim.tenant, source.run, batch=None)
    except ToolFailure as failure:
        raise _build_expired_error(source) from failure
    # An earlier owner may have died while it copied.
    copier, missing = StepCopier(source.step, names[0], claim.run, names[1]), -len(run_log.entries)
    async for event in entries:
        copied = copier.copy(event)
        if copier.is_over:
            break
        missing += copied is not None
        if copied is not None and missing > 0:
            await run_log.append(copied)


def _build_expired_error(source: ForkSource) -> ConfigError:
    return ConfigError(
        f"the log of run {source.run}, from which this run was forked, is no longer stored: fork another run"
    )


@dataclass(frozen=True)
class ForkPlan:
    """What the forks of a run start from. `state`: the session that keeps the state."""

    source: ForkSource
    state: str
    body: RunBody
    environment: ItemEnvironment
    priority: int


def plan_fork(run: str, record: RunRecord, shared: SharedSteps, step: int, defaults: BatchDefaults) -> ForkPlan:
    """Return the plan of forks that share the first `step` steps of the run. `shared`: what its log says. `defaults`:
    the defaults of the run's batch.

    Raises ToolFailure(INVALID_ARGUMENTS): the run has no state of that step.
    """
    body = record.item.work
    states = shared.states
    if not isinstance(body, RunBody) or not body.keep_states:
        raise _refused(f"run {run} keeps no states, so it cannot be forked: start it with `keep_states`")
    if shared.is_empty:
        raise _refused(f"the log of run {run} is empty or no longer stored: fork a run within a day of its end")
    if step not in states:
        shown = ", ".join(str(number) for number in sorted(states)) or "none yet"
        raise _refused(
            f"run {run} has no state after {count(step, 'step')}: use one of its states ({shown}). A run keeps a state "
            "before each request to the model"
        )
    if not states[step].session:
        raise _refused(
            f"the state of run {run} after {count(step, 'step')} was not stored: {states[step].problem}. Use another "
            "step"
        )
    # The settings are copied now, because the defaults of the batch may change before the fork is claimed.
    own: dict[str, Any] = {
        "model": body.model or defaults.model,
        "dialect": body.dialect or defaults.dialect,
        "profile": body.profile or defaults.profile,
        "limits": body.limits.with_defaults(defaults.limits),
    }
    state = states[step].session
    return ForkPlan(
        source=ForkSource(run=run, step=step, attempt=record.attempt, entries=shared.count),
        state=state,
        body=body.model_copy(update=own),
        environment=ItemEnvironment(fork=state, artifacts=record.item.environment.artifacts),
        priority=record.item.priority,
    )


def check_count(n: int) -> None:
    """Raise ToolFailure(INVALID_ARGUMENTS) for a number of forks that cannot be made at once."""
    if not 1 <= n <= MAX_FORKS:
        raise _refused(f"one request makes 1 to {MAX_FORKS} forks, not {n}: request a number in this range")


def _refused(message: str) -> ToolFailure:
    return ToolFailure(ErrorCode.INVALID_ARGUMENTS, message)


@dataclass
class ForkTree:
    """A run with its forks. `step`: the number of steps that it shares with the run above it; None for the first run.
    `run` None: the run is no longer stored, or is an item of a batch.
    """

    name: str
    step: int | None = None
    run: DurableRun | None = None
    forks: list["ForkTree"] = field(default_factory=list)


async def build_tree(queue: RunQueue, tenant: str, run: DurableRun) -> ForkTree:
    """Return the tree of forks that contains the run: the first run, its forks, their forks and so on. The tree has at
    most MAX_TREE_RUNS runs. Raises BrokerUnavailable.
    """
    top = ForkTree(run.id, run=run)
    # The search is limited upwards and downwards, because the lists of forks are not signed: a forged list could
    # contain a cycle.
    for _ in range(MAX_TREE_DEPTH):
        if top.run is None or top.run.forked_from is None:
            break
        name = top.run.forked_from.run
        top = ForkTree(name, run=(await queue.runs.find_runs(tenant, [name]))[0])
    level, free = [top], MAX_TREE_RUNS - 1
    while level:
        for node, rows in zip(level, await queue.runs.forks(tenant, [node.name for node in level]), strict=True):
            node.forks = [ForkTree(name, step) for step, name in sorted(rows, key=lambda row: row[0])[:free]]
            free -= len(node.forks)
        level = [fork for node in level for fork in node.forks]
        for node, found in zip(level, await queue.runs.find_runs(tenant, [node.name for node in level]), strict=True):
            node.run = found
    return top
