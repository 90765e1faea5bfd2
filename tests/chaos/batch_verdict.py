"""Check that a batch is correct after any kill. The evidence is its files, the tally of its calls' effects, and the
request count of the model server.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Evidence:
    """The evidence from outside.

    `rows`: by orchestrator, from both of its files, the rows of the last orchestrator first. `acts`: item -> step ->
    the marks of the workspaces of each execution. `attempts`: how often each item was started. `struck`: how often a
    killed orchestrator may have held each item. `may_lose`: a worker or Redis was hit, so the outcome of some calls
    is unknown and items may be restarted. `may_repeat`: Redis lost its last second, including records of paid replies
    and executed calls.
    """

    items: Sequence[str]
    calls: int
    rows: Mapping[str, Sequence[Mapping[str, Any]]]
    acts: Mapping[str, Mapping[int, Sequence[str]]]
    attempts: Mapping[str, int]
    replies: Mapping[str, Mapping[int, int]]
    struck: Mapping[str, int] = field(default_factory=dict)
    may_lose: bool = False
    may_repeat: bool = False


@dataclass(frozen=True)
class BatchVerdict:
    """The result of the checks. `wrong`: sentences; empty if all checks passed. `unknown`: calls that did not execute
    and whose outcome was reported as unknown. `restarted`: attempts after the first.
    """

    wrong: tuple[str, ...]
    items: int
    acts: int
    unknown: int
    restarted: int
    replies_repeated: int


def read_tally(tally: Path, mark: str) -> dict[str, dict[int, list[str]]]:
    """Return item -> step -> marks of workspaces, for the items of one batch."""
    acts: dict[str, dict[int, list[str]]] = {}
    for file in tally.glob(f"{mark}-*.*"):
        item, _, step = file.name.rpartition(".")
        acts.setdefault(item, {})[int(step)] = file.read_text().split()
    return acts


def judge_batch(evidence: Evidence) -> BatchVerdict:
    """Return the failures and some figures."""
    first = next(iter(evidence.rows.values()), ())
    answers = {str(row["custom_id"]): _answer(row) for row in first if row.get("error") is None}
    wrong = [sentence for name, rows in evidence.rows.items() for sentence in _judge_rows(name, rows, evidence.items)]
    wrong += [f"{row['custom_id']} failed in the end: {row['error']}" for row in first if row.get("error") is not None]
    # If Redis lost data, repeated executions and replies are permitted, so these checks are skipped.
    if not evidence.may_repeat:
        wrong += [sentence for item in evidence.items for sentence in _judge_acts(item, evidence, answers.get(item))]
        wrong += [sentence for item in evidence.items for sentence in _judge_replies(item, evidence)]
    wrong += [f"{item} acted, and is no item" for item in evidence.acts.keys() - set(evidence.items)]
    return BatchVerdict(
        wrong=tuple(wrong),
        items=len(evidence.items),
        acts=sum(len(marks) for steps in evidence.acts.values() for marks in steps.values()),
        unknown=sum(evidence.calls - len(acts) for _, acts in answers.values()),
        restarted=sum(attempts - 1 for attempts in evidence.attempts.values()),
        replies_repeated=sum(_repeated(evidence, item) for item in evidence.items),
    )


def _judge_rows(name: str, rows: Iterable[Mapping[str, Any]], items: Sequence[str]) -> Iterable[str]:
    counts = Counter(str(row["custom_id"]) for row in rows)
    yield from (f"{item} has {counts[item]} rows of orchestrator {name}" for item in items if counts[item] != 1)
    yield from (f"orchestrator {name} wrote a row of {item}, which is no item" for item in counts.keys() - set(items))


def _judge_acts(item: str, evidence: Evidence, answer: tuple[str, list[int]] | None) -> Iterable[str]:
    """Check the executions from outside and from inside. No call may execute twice in the workspace of one attempt,
    and the answer must match the executions of the last attempt.
    """
    steps, attempts = evidence.acts.get(item, {}), evidence.attempts.get(item, 1)
    # Each attempt has its own workspace, so the mark distinguishes a repeated call from a restarted attempt.
    workspaces = {mark for marks in steps.values() for mark in marks}
    for step, marks in sorted(steps.items()):
        if len(marks) > attempts:
            yield f"{item} acted {len(marks)} times at step {step} and was begun {attempts} times"
            continue
        yield from (
            f"{item} acted {count} times at step {step} of one attempt"
            for count in Counter(marks).values()
            if count > 1
        )
    # A session whose host is lost continues on another host, possibly with another workspace.
    if len(workspaces) > attempts and not evidence.may_lose:
        yield f"{item} acted in {len(workspaces)} workspaces and was begun {attempts} times"
    if attempts > 1 and not evidence.may_lose:
        yield f"{item} was begun {attempts} times though only orchestrators were struck"
    if answer is None:
        return
    workspace, result = answer
    acted = sorted(step for step, marks in steps.items() if workspace in marks)
    # A command that was killed between its two marks has left only the first mark.
    is_told = set(result) <= set(acted) if evidence.may_lose else result == acted
    if not is_told or len(result) != len(set(result)):
        yield f"{item} tells that it acted at steps {result}, and acted at {acted}"
    if not evidence.may_lose and acted != list(range(evidence.calls)):
        yield f"{item} acted at steps {acted} of {evidence.calls} though only orchestrators were struck"


def _judge_replies(item: str, evidence: Evidence) -> Iterable[str]:
    """Check the number of replies. A restarted attempt requests every reply again."""
    repeated, struck = _repeated(evidence, item), evidence.struck.get(item, 0)
    # An orchestrator may be killed between a reply and its log entry. Each fault therefore permits one repeated
    # reply.
    if evidence.attempts.get(item, 1) == 1 and repeated > struck:
        yield (
            f"{item} was answered {repeated} times more than it has steps, and its orchestrators were struck {struck} "
            "times"
        )


def _repeated(evidence: Evidence, item: str) -> int:
    return sum(count - 1 for count in evidence.replies.get(item, {}).values() if count > 1)


def _answer(row: Mapping[str, Any]) -> tuple[str, list[int]]:
    """Return the workspace and the steps that the workspace contains."""
    workspace, _, acts = str(row["response"]["body"]["answer"]).partition(" ")
    return workspace, [int(step) for step in acts.split(",") if step]
