"""Statistics of graded items: pass@1, pass@k with confidence intervals, and the cost of a solved item.

An item counts with its reward. An item that the agent failed without a result, or whose grader failed, counts as not
solved: an agent must not gain from breaking its grader. Items that the infrastructure failed do not count.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from toolcrew.contract.calls import Record
from toolcrew.contract.plurals import plural
from toolcrew.contract.run_events import FailureKind, RunEnded
from toolcrew.orchestrator.terminal.figures import format_cost, format_count

_Z = 1.959964
"""Quantile of the normal distribution for an interval of 95 %."""
_NOT_COUNTED = (FailureKind.INFRASTRUCTURE, FailureKind.INPUT, FailureKind.CANCELLED)


class PassRate(Record):
    """pass@k: the probability that at least one of k attempts at a task solves it, averaged over the `tasks` with k
    counted attempts. `low`, `high`: Wilson's interval of 95 % with the tasks as the sample.
    """

    k: int
    tasks: int
    rate: float
    low: float
    high: float


class GradeSummary(Record):
    """Statistics of a batch's graded items that have ended. `counted`: number of items without those that failed
    because of the infrastructure or the input, or were cancelled.

    `solved`: items with the reward 1. `refused`: items whose artifacts were refused, with the reward 0.
    `grader_errors`: counted as not solved. `mean_reward`: mean over the items with a reward; None if no item has a
    reward. `tokens_per_solved`, `cost_per_solved`: the sum over all graded items, divided by `solved`; None if the sum
    is unknown or no item is solved.
    """

    tasks: int
    counted: int
    solved: int
    refused: int
    grader_errors: int
    infrastructure: int
    input: int
    cancelled: int
    mean_reward: float | None
    passes: tuple[PassRate, ...]
    tokens_per_solved: float | None
    cost_per_solved: float | None


@dataclass(slots=True, frozen=True)
class ItemGrade:
    """Values of an ended, graded item from which the statistics of its batch are computed. `cost` None: unknown."""

    task: str
    reward: float | None
    is_refused: bool
    failure: FailureKind | None
    tokens: int
    cost: float | None


def build_item_grade(end: RunEnded) -> ItemGrade | None:
    """Return the values of an ended item that `summarize` needs; None if the item has no grader."""
    if not end.task:
        return None
    grade = end.grade
    return ItemGrade(
        task=end.task,
        reward=grade.reward if grade is not None else None,
        is_refused=grade is not None and bool(grade.refusal),
        failure=end.failure.kind if end.failure is not None else None,
        tokens=end.usage.prompt_tokens + end.usage.completion_tokens,
        cost=end.cost,
    )


def summarize(grades: Iterable[ItemGrade]) -> GradeSummary | None:
    """Return the statistics of these items; None if there are no graded items."""
    items = list(grades)
    if not items:
        return None
    attempts = defaultdict[str, list[bool]](list)
    for item in items:
        if item.reward is not None or item.failure not in _NOT_COUNTED:
            attempts[item.task].append(item.reward == 1)
    rewards = [item.reward for item in items if item.reward is not None]
    solved = sum(map(sum, attempts.values()))
    costs = [item.cost for item in items if item.cost is not None]
    uncounted = [item.failure for item in items if item.reward is None]
    return GradeSummary(
        tasks=len({item.task for item in items}),
        counted=sum(map(len, attempts.values())),
        solved=solved,
        refused=sum(item.is_refused for item in items),
        grader_errors=uncounted.count(FailureKind.GRADER),
        infrastructure=uncounted.count(FailureKind.INFRASTRUCTURE),
        input=uncounted.count(FailureKind.INPUT),
        cancelled=uncounted.count(FailureKind.CANCELLED),
        mean_reward=math.fsum(rewards) / len(rewards) if rewards else None,
        passes=tuple(_rates([(len(attempt), sum(attempt)) for attempt in attempts.values()])),
        tokens_per_solved=sum(item.tokens for item in items) / solved if solved else None,
        cost_per_solved=math.fsum(costs) / solved if solved and costs else None,
    )


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from `attempts` at one task, of which `solved` have solved it."""
    # 1 - C(n - c, k) / C(n, k), as a product that does not overflow.
    missed = 1.0
    for n in range(attempts - solved + 1, attempts + 1):
        missed *= 1 - k / n
    return 1 - max(0.0, missed)


def wilson(rate: float, count: int) -> tuple[float, float]:
    """Return the ends of Wilson's interval for the mean of `count` values from 0 to 1. For values between 0 and 1 the
    interval is wider than needed: their variance is smaller than the variance of values 0 or 1 with the same mean.
    """
    scale = 1 + _Z**2 / count
    center = (rate + _Z**2 / (2 * count)) / scale
    half = _Z * math.sqrt(rate * (1 - rate) / count + _Z**2 / (4 * count**2)) / scale
    return max(0.0, center - half), min(1.0, center + half)


def _rates(tasks: list[tuple[int, int]]) -> Iterable[PassRate]:
    """Yield pass@k for k = 1, 2, 4, ..., and for k = the largest number of attempts at a task. `tasks`: for each task,
    the number of attempts, and of attempts that solved it.
    """
    largest = max((attempts for attempts, _ in tasks), default=0)
    sizes = [2**power for power in range(largest.bit_length()) if 2**power < largest]
    for k in [*sizes, largest] if largest else []:
        values = [pass_at_k(attempts, solved, k) for attempts, solved in tasks if attempts >= k]
        rate = min(1.0, math.fsum(values) / len(values))
        low, high = wilson(rate, len(values))
        yield PassRate(k=k, tasks=len(values), rate=rate, low=low, high=high)


def format_grades(grades: GradeSummary) -> list[tuple[str, str]]:
    """Return the statistics as pairs of a name and a text."""
    passes = [
        (
            f"pass@{rate.k}",
            f"{rate.rate:.3f} (95 %: {rate.low:.3f} to {rate.high:.3f}, {rate.tasks:,} {plural(rate.tasks, 'task')})",
        )
        for rate in grades.passes
    ]
    counts = {
        "grader errors, not solved": grades.grader_errors,
        "artifacts refused, reward 0": grades.refused,
        "infrastructure, not counted": grades.infrastructure,
        "input, not counted": grades.input,
        "cancelled, not counted": grades.cancelled,
    }
    rows = [
        ("tasks", f"{grades.tasks:,}"),
        ("solved", f"{grades.solved:,} of {grades.counted:,} {plural(grades.counted, 'attempt')}"),
        ("mean reward", "none" if grades.mean_reward is None else f"{grades.mean_reward:.3f}"),
        *passes,
        *((name, f"{count:,}") for name, count in counts.items() if count),
    ]
    if grades.tokens_per_solved is not None:
        rows.append(("tokens per solved item", format_count(round(grades.tokens_per_solved))))
    if grades.cost_per_solved is not None:
        rows.append(("cost per solved item", format_cost(grades.cost_per_solved)))
    return rows
