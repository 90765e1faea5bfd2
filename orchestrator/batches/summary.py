"""Summary at the end of a batch: totals, failures with one example each, and the next steps."""

from collections.abc import Sequence
from shlex import quote
from typing import Literal

from toolcrew.contract.plurals import count, plural
from toolcrew.contract.run_events import FailureKind
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.orchestrator.batches.grades import GradeSummary, format_grades
from toolcrew.orchestrator.batches.progress import FailureGroup, ProgressSnapshot
from toolcrew.orchestrator.terminal.commands import build_command, build_resubmission
from toolcrew.orchestrator.terminal.figures import (
    MAX_NOTE_CHARS,
    format_cost,
    format_count,
    format_rate,
    format_seconds,
    one_line,
)

MAX_SHOWN_GROUPS = 10


class Summary(ProgressSnapshot):
    """Progress at the end of a batch. `next`: sentences that say what to do. `grades`: None without graded items."""

    type: Literal["summary"] = "summary"
    batch: str
    next: tuple[str, ...]
    grades: GradeSummary | None = None


def build_summary(
    snapshot: ProgressSnapshot,
    *,
    batch: str,
    tenant: str = DEFAULT_TENANT,
    is_kept: bool = True,
    rows: Sequence[str] = (),
    grades: GradeSummary | None = None,
) -> Summary:
    """Return the summary. `batch`, `tenant`: used in the commands of the summary.

    `is_kept`: the batch is still stored after this command, because its Redis continues to run. Only then the summary
    suggests commands for the batch. `rows`: files with the rows of successes and of failures.
    """
    fields = {name: getattr(snapshot, name) for name in ProgressSnapshot.model_fields}
    sentences = tuple(_next(snapshot, one_line(batch), tenant, is_kept, rows))
    return Summary(**fields, batch=batch, next=sentences, grades=grades)


def _next(snapshot: ProgressSnapshot, batch: str, tenant: str, is_kept: bool, rows: Sequence[str]) -> list[str]:
    """Return the sentences about the next steps."""
    sentences, counts = [], snapshot.failures
    resume = retry = (
        f"by submitting the same file again with `{build_resubmission(batch, tenant)}` and the same --output"
    )
    if is_kept:
        resume = f"with `{build_command('batches', 'resume', batch, tenant=tenant)}`"
        retry = f"with `{build_command('batches', 'resume', batch, '--retry', 'infrastructure', tenant=tenant)}`"
    if unfinished := snapshot.running + snapshot.queued:
        sentences.append(
            f"{unfinished:,} {'item has' if unfinished == 1 else 'items have'} no result yet: resume {resume}"
        )
    if cancelled := counts.get(FailureKind.CANCELLED, 0):
        sentences.append(f"{cancelled:,} were cancelled: resume them {resume}")
    if infrastructure := counts.get(FailureKind.INFRASTRUCTURE, 0):
        sentences.append(f"{infrastructure:,} failed because of the infrastructure: retry them {retry}")
    if wrong := counts.get(FailureKind.INPUT, 0):
        sentences.append(f"{wrong:,} failed because of their lines: fix these lines and submit them as another batch")
    if count := counts.get(FailureKind.MODEL, 0):
        run = next((group.run for group in snapshot.groups if group.kind == FailureKind.MODEL and group.run), "RUN")
        show = f"`{build_command('traces', 'show', one_line(run), tenant=tenant)}`"
        sentences.append(f"{count:,} failed because of the model, and would fail again: show an example with {show}")
    if count := counts.get(FailureKind.TOOL, 0):
        sentences.append(f"{count:,} failed because of a tool, and would fail again: read the reasons in their rows")
    if count := counts.get(FailureKind.GRADER, 0):
        sentences.append(f"{count:,} have no reward, because their grader failed: read its output in their rows")
    if snapshot.ended and rows:
        files = [row for row, count in zip(rows, (snapshot.done, snapshot.failed), strict=True) if count]
        sentences.append(f"read the rows in {' and '.join(one_line(quote(row)) for row in files)}")
    elif snapshot.ended and is_kept:
        sentences.append(f"read the rows with `{build_command('batches', 'export', batch, tenant=tenant)}`")
    return sentences


def build_summary_lines(summary: Summary) -> list[str]:
    """Return the summary for people. The lines are safe for a terminal, but may be wider than the terminal."""
    s = summary
    counts = [f"{s.done:,} of {s.total:,} succeeded", f"{s.failed:,} failed"]
    counts += [f"{count:,} {state}" for count, state in ((s.running, "running"), (s.queued, "queued")) if count]
    again = "".join(
        f", {count:,} {state}" for count, state in ((s.retried, "retried"), (s.resumed, "resumed")) if count
    )
    work = f"{s.steps:,} {plural(s.steps, 'step')}, {s.calls:,} {plural(s.calls, 'call')}"
    rates = f"{format_rate(s.items_per_s)} items/s, {work}"
    tokens = f"{format_count(s.prompt_tokens)} in, {format_count(s.completion_tokens)} out"
    return [
        f"batch {one_line(s.batch)}: {'done' if s.has_ended else 'not finished'}, {', '.join(counts)}",
        f"  {format_seconds(s.wall_s)}, {rates}{again}",
        f"  tokens {tokens}; cost {format_cost(s.cost, s.cost_unknown)}; sandbox CPU {format_seconds(s.cpu_s)}",
        *(f"  {name}: {figure}" for name, figure in (format_grades(s.grades) if s.grades is not None else ())),
        *(f"  warning: {one_line(warning, MAX_NOTE_CHARS)}" for warning in s.warnings),
        *(_group_line(group) for group in s.groups[:MAX_SHOWN_GROUPS]),
        *_hidden_groups_line(s.groups[MAX_SHOWN_GROUPS:]),
        *(f"  next: {sentence}" for sentence in s.next),
    ]


def _group_line(group: FailureGroup) -> str:
    """Return the line about a group of failures."""
    message = f": {one_line(group.message)}" if group.message else ""
    example = f", as {one_line(group.item, 60)}{message}" if group.item else ""
    return f"  failed {group.count:,}: {group.kind} {one_line(group.code, 64)}{example}"


def _hidden_groups_line(groups: Sequence[FailureGroup]) -> list[str]:
    """Return the line about the groups that are not shown, if there are any."""
    failed = sum(group.count for group in groups)
    return [f"  and {failed:,} more failed with {count(len(groups), 'other code')}"] if groups else []
