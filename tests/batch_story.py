"""Batches made up for tests of progress, displays and reports: every batch_event that a real one would have told."""

from collections.abc import Iterator
from dataclasses import dataclass

from contract.calls import Clocks
from store.batches import (
    BatchEvent,
    BatchNotice,
    CallDone,
    FailureKind,
    ItemDone,
    ItemReady,
    ItemRetried,
    ItemStarted,
    StepDone,
)

BEGAN = 1_700_000_000.0


@dataclass(frozen=True)
class Attempt:
    """One attempt of an item. `failure`: of its end; `is_retried`: it ended by being queued again; `is_cut`: it still
    runs.
    """

    steps: int = 2
    calls_a_step: int = 2
    waited_s: float = 0.5
    step_s: float = 1.0
    failure: FailureKind | None = None
    code: str = ""
    message: str = ""
    is_retried: bool = False
    is_cut: bool = False
    is_resumed: bool = False
    cost: float | None = 0.25
    tool: str = "bash_tool"


def tell_item(item: str, *attempts: Attempt, at: float = BEGAN) -> Iterator[BatchEvent]:
    """What is told of one item; `at`: when its first attempt was queued."""
    for number, attempt in enumerate(attempts, 1):
        run, at = f"run-{item}", at + attempt.waited_s
        yield ItemStarted(at=at, item=item, run=run, attempt=number, waited_s=attempt.waited_s)
        began = at
        yield ItemReady(at=at + 0.1, item=item, run=run, attempt=number, setup_s=0.1)
        if attempt.is_resumed:
            yield ItemStarted(at=at + 0.2, item=item, run=run, attempt=number, is_resumed=True)
        calls = 0
        for step in range(1, attempt.steps + 1):
            at += attempt.step_s
            for call in range(attempt.calls_a_step):
                calls += 1
                code = "TIMEOUT" if calls % 7 == 0 else None
                clocks = Clocks(queued_s=0.01 * step, run_s=0.1)
                yield CallDone(
                    at=at,
                    item=item,
                    run=run,
                    attempt=number,
                    call=f"{item}-{number}-{step}-{call}",
                    tool=attempt.tool,
                    seconds=0.2 * step,
                    error_code=code,
                    clocks=clocks,
                )
            yield StepDone(
                at=at,
                item=item,
                run=run,
                attempt=number,
                step=step,
                model_s=0.7,
                prompt_tokens=100,
                completion_tokens=10,
            )
        if attempt.is_cut:
            return
        if attempt.is_retried:
            failure = attempt.failure or FailureKind.INFRASTRUCTURE
            yield ItemRetried(at=at, item=item, run=run, attempt=number + 1, failure=failure, code=attempt.code)
            continue
        yield ItemDone(
            at=at,
            item=item,
            run=run,
            attempt=number,
            failure=attempt.failure,
            code=attempt.code,
            message=attempt.message,
            seconds=at - began,
            steps=attempt.steps,
            calls=calls,
            prompt_tokens=100 * attempt.steps,
            completion_tokens=10 * attempt.steps,
            cost=attempt.cost,
        )


def tell_batch(*items: tuple[Attempt, ...], every_s: float = 0.1, total: int | None = None) -> list[BatchEvent]:
    """A whole batch, by time; item `i-0` first."""
    told: list[BatchEvent] = [BatchNotice(at=BEGAN, message="submitted", total=len(items) if total is None else total)]
    for number, attempts in enumerate(items):
        told += tell_item(f"i-{number}", *attempts, at=BEGAN + number * every_s)
    return sorted(told, key=lambda batch_event: batch_event.at)


def failed(
    kind: FailureKind = FailureKind.INFRASTRUCTURE,
    code: str = "HOST_LOST",
    message: str = "its host is gone",
    **rest: int,
) -> Attempt:
    """One that ends badly."""
    return Attempt(failure=kind, code=code, message=message, **rest)
