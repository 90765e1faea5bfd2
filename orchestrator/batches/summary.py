"""What is said of a batch at the end: totals, failures with an example each, the slowest items, and what to do next."""

from collections.abc import Sequence
from shlex import quote
from typing import Literal

from contract.tenancy import DEFAULT_TENANT
from orchestrator.batches.figures import (
    MAX_NOTE_CHARS,
    format_cost,
    format_count,
    format_rate,
    format_seconds,
    one_line,
)
from orchestrator.batches.snapshot import FailureGroup, Snapshot
from orchestrator.terminal.commands import build_command, build_resubmission
from store.batches import FailureKind

MAX_SHOWN_GROUPS = 10
MAX_SHOWN_SLOWEST = 5


class Summary(Snapshot):
    """`next`: sentences, each with what to do."""

    type: Literal["summary"] = "summary"
    batch: str
    next: tuple[str, ...]


def build_summary(
    snapshot: Snapshot, *, batch: str, tenant: str = DEFAULT_TENANT, is_kept: bool = True, rows: Sequence[str] = ()
) -> Summary:
    """`batch`: its id and `tenant`: whose it is, for the commands that it names; without `is_kept` nothing but its
    files is left of it afterwards. `rows`: the files with its rows, of successes and of failures."""
    fields = {name: getattr(snapshot, name) for name in Snapshot.model_fields}
    return Summary(**fields, batch=batch, next=tuple(_next(snapshot, one_line(batch), tenant, is_kept, rows)))


def _next(snapshot: Snapshot, batch: str, tenant: str, is_kept: bool, rows: Sequence[str]) -> list[str]:
    told, counts = [], snapshot.failures
    resume = retry = (
        f"by submitting the same file again with `{build_resubmission(batch, tenant)}` and the same --output"
    )
    if is_kept:
        resume = f"with `{build_command('batch', 'resume', batch, tenant=tenant)}`"
        retry = f"with `{build_command('batch', 'retry', batch, '--errors', tenant=tenant)}`"
    unfinished = snapshot.running + snapshot.queued
    if unfinished:
        told.append(f"{unfinished:,} {_items(unfinished)} without a result yet: go on {resume}")
    if cancelled := counts.get(FailureKind.CANCELLED, 0):
        told.append(f"{cancelled:,} cancelled: begin them after all {resume}")
    if infrastructure := counts.get(FailureKind.INFRASTRUCTURE, 0):
        told.append(f"{infrastructure:,} failed for the infrastructure: try them again {retry}")
    if wrong := counts.get(FailureKind.INPUT, 0):
        told.append(
            f"{wrong:,} failed for what their lines name: mend these lines and submit them as a batch of their own"
        )
    if count := counts.get(FailureKind.MODEL, 0):
        run = next((group.run for group in snapshot.groups if group.kind == FailureKind.MODEL and group.run), "RUN")
        look = f"`{build_command('trace', 'show', one_line(run), tenant=tenant)}`"
        told.append(
            f"{count:,} failed for the model, as they would again: see what happened, of one of them with {look}"
        )
    if count := counts.get(FailureKind.TOOL, 0):
        told.append(f"{count:,} failed for a tool, as they would again: their rows say why")
    if snapshot.ended and rows:
        shown = [row for row, count in zip(rows, (snapshot.done, snapshot.failed), strict=True) if count]
        told.append(f"read the rows in {' and '.join(one_line(quote(row)) for row in shown)}")
    elif snapshot.ended and is_kept:
        told.append(f"read what there is with `{build_command('batch', 'results', batch, tenant=tenant)}`")
    return told


def build_summary_lines(summary: Summary) -> list[str]:
    """The same for people. Safe on a terminal; lines may be longer than one is wide."""
    s = summary
    head = "done" if s.has_ended else "not finished"
    counts = [f"{s.done:,} of {s.total:,} succeeded", f"{s.failed:,} failed"]
    counts += [f"{count:,} {word}" for count, word in ((s.running, "running"), (s.queued, "queued")) if count]
    lines = [f"batch {one_line(s.batch)}: {head}, {', '.join(counts)}"]
    extra = [f"{count:,} {word}" for count, word in ((s.retried, "tried again"), (s.resumed, "resumed")) if count]
    lines.append(
        f"  {format_seconds(s.wall_s)}, {s.steps:,} steps, {s.calls:,} calls ({format_rate(s.calls_per_s_overall)} a "
        "second)"
    )
    lines[-1] += "".join(f", {part}" for part in extra)
    lines.append(
        f"  tokens {format_count(s.prompt_tokens)} in, {format_count(s.completion_tokens)} out; cost "
        f"{format_cost(s.cost, s.cost_unknown)}"
    )
    lines += [f"  warning: {one_line(warning, MAX_NOTE_CHARS)}" for warning in s.warnings]
    lines += [_group_line(group) for group in s.groups[:MAX_SHOWN_GROUPS]]
    if rest := s.groups[MAX_SHOWN_GROUPS:]:
        lines.append(f"  and {sum(group.count for group in rest):,} more failed with {len(rest)} other codes")
    if s.slowest:
        slowest = (
            f"{one_line(item.item, 60)} {format_seconds(item.seconds)}" for item in s.slowest[:MAX_SHOWN_SLOWEST]
        )
        lines.append(f"  slowest: {', '.join(slowest)}")
    return [*lines, *(f"  next: {sentence}" for sentence in s.next)]


def _group_line(group: FailureGroup) -> str:
    line = f"  failed {group.count:,}: {group.kind} {one_line(group.code, 64)}"
    if not group.item:
        return line
    message = f": {one_line(group.message)}" if group.message else ""
    return f"{line}, as {one_line(group.item, 60)}{message}"


def _items(count: int) -> str:
    return "item" if count == 1 else "items"
