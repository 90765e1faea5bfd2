"""Invented batches for tests of progress, displays and reports, with all events of a real batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from toolcrew.contract.calls import Clocks, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.functions.completions import TokenUsage
from toolcrew.contract.run_events import (
    BatchNotice,
    CallFinished,
    Failure,
    FailureKind,
    RunClaimed,
    RunEnded,
    RunEvent,
    RunReady,
    RunRetried,
    StepFinished,
)
from toolcrew.store.batches import final_state

STARTED_AT = 1_700_000_000.0


def claimed(at: float, item: str, *, run: str = "run", attempt: int = 1, **fields: Any) -> RunClaimed:
    return RunClaimed(run=run, at=at, attempt=attempt, item=item, **fields)


def step_finished(
    at: float,
    item: str,
    step: int,
    *,
    run: str = "run",
    attempt: int = 1,
    model_s: float = 0.0,
    tokens: tuple[int, int] = (0, 0),
) -> StepFinished:
    """Return the end of a step. `tokens`: of the prompt and of the completion."""
    return StepFinished(
        run=run, at=at, attempt=attempt, item=item, step=step, model_s=model_s, usage=TokenUsage(*tokens)
    )


def call_finished(
    at: float,
    item: str,
    call: str,
    tool: str = "t",
    *,
    run: str = "run",
    attempt: int = 1,
    seconds: float = 0.1,
    error_code: str | None = None,
    clocks: Clocks | None = None,
) -> CallFinished:
    # The names of hostile tools are longer than the limit of a result.
    result = ToolResult.model_construct(
        call_id=call,
        name=tool,
        success=error_code is None,
        error_code=ErrorCode(error_code) if error_code is not None else None,
        clocks=clocks or Clocks(),
    )
    return CallFinished(run=run, at=at, attempt=attempt, item=item, result=result, seconds=seconds)


def retried(
    at: float, item: str, attempt: int, failure: FailureKind, *, run: str = "run", code: str = ""
) -> RunRetried:
    return RunRetried(run=run, at=at, attempt=attempt, item=item, failure=Failure(kind=failure, code=code, message=""))


def ended(
    at: float,
    item: str,
    *,
    run: str = "run",
    attempt: int = 1,
    failure: FailureKind | None = None,
    code: str = "",
    message: str = "",
    tokens: tuple[int, int] = (0, 0),
    **fields: Any,
) -> RunEnded:
    """Return the end of an item. `tokens`: of all prompts and of all completions."""
    cause = Failure(kind=failure, code=code, message=message) if failure is not None else None
    return RunEnded(
        run=run,
        at=at,
        attempt=attempt,
        item=item,
        state=final_state(cause),
        failure=cause,
        usage=TokenUsage(*tokens),
        **fields,
    )


@dataclass(frozen=True)
class Attempt:
    """An attempt of an item. `failure`: the reason for its end. `is_retried`: the attempt ended and the item was
    queued again. `is_unfinished`: the attempt still runs.
    """

    steps: int = 2
    calls_a_step: int = 2
    waited_s: float = 0.5
    step_s: float = 1.0
    failure: FailureKind | None = None
    code: str = ""
    message: str = ""
    is_retried: bool = False
    is_unfinished: bool = False
    is_resumed: bool = False
    cost: float | None = 0.25
    tool: str = "bash_tool"


def build_item_events(item: str, *attempts: Attempt, at: float = STARTED_AT) -> Iterator[RunEvent]:
    """Yield the events of one item. `at`: when its first attempt was queued."""
    run = f"run-{item}"
    for number, attempt in enumerate(attempts, 1):
        at += attempt.waited_s
        yield claimed(at, item, run=run, attempt=number, waited_s=attempt.waited_s)
        started_at = at
        yield RunReady(run=run, at=at + 0.1, attempt=number, item=item, setup_s=0.1)
        if attempt.is_resumed:
            yield claimed(at + 0.2, item, run=run, attempt=number, is_resumed=True)
        calls = 0
        for step in range(1, attempt.steps + 1):
            at += attempt.step_s
            for call in range(attempt.calls_a_step):
                calls += 1
                yield call_finished(
                    at,
                    item,
                    f"{item}-{number}-{step}-{call}",
                    attempt.tool,
                    run=run,
                    attempt=number,
                    seconds=0.2 * step,
                    error_code="TIMEOUT" if calls % 7 == 0 else None,
                    clocks=Clocks(queued_s=0.01 * step, run_s=0.1),
                )
            yield step_finished(at, item, step, run=run, attempt=number, model_s=0.7, tokens=(100, 10))
        if attempt.is_unfinished:
            return
        if attempt.is_retried:
            failure = attempt.failure or FailureKind.INFRASTRUCTURE
            yield retried(at, item, number + 1, failure, run=run, code=attempt.code)
            continue
        yield ended(
            at,
            item,
            run=run,
            attempt=number,
            failure=attempt.failure,
            code=attempt.code,
            message=attempt.message,
            seconds=at - started_at,
            steps=attempt.steps,
            calls=calls,
            tokens=(100 * attempt.steps, 10 * attempt.steps),
            cost=attempt.cost,
        )


def build_batch_events(*items: tuple[Attempt, ...], every_s: float = 0.1, total: int | None = None) -> list[RunEvent]:
    """Return the events of a whole batch, sorted by time. Item `i-0` comes first."""
    events: list[RunEvent] = [
        BatchNotice(at=STARTED_AT, message="submitted", total=len(items) if total is None else total)
    ]
    for number, attempts in enumerate(items):
        events += build_item_events(f"i-{number}", *attempts, at=STARTED_AT + number * every_s)
    return sorted(events, key=lambda event: event.at)


def failed_attempt(
    kind: FailureKind = FailureKind.INFRASTRUCTURE,
    code: str = "HOST_LOST",
    message: str = "its host is gone",
    **rest: Any,
) -> Attempt:
    """Return an attempt that fails."""
    return Attempt(failure=kind, code=code, message=message, **rest)
