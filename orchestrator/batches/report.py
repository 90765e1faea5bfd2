"""Report of a batch as one HTML page that works offline: results, failures, times, tokens and cost."""

import heapq
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence

from contract.calls import MAX_NAME_CHARS
from contract.run_events import CallFinished, RunClaimed, RunEnded, RunEvent, RunReady, RunRetried, StepFinished
from contract.tenancy import DEFAULT_TENANT
from orchestrator.batches.figures import (
    format_cost,
    format_count,
    format_rate,
    format_seconds,
    format_time,
    one_line,
)
from orchestrator.batches.grades import format_grades
from orchestrator.batches.markup import Markup, element, join, text
from orchestrator.batches.progress import BatchProgress, ProgressSnapshot, Stage
from orchestrator.batches.report_page import build_page, figure, paragraph, table
from orchestrator.batches.report_plots import Line, add_up, limit_time, plot_lines
from orchestrator.batches.summary import Summary, build_summary

MAX_FAILED_ROWS = 500
MAX_GROUP_ROWS = 50
MAX_SLOWEST = 20
MAX_TOOLS = 200
"""Limit of the tools that the report lists. A model can request tools that do not exist, with any name."""
OTHER_TOOLS = "(other tools)"
MAX_CELL_CHARS = 240
MAX_CODE_CHARS = 64
_TIMES = ("times", "mean", "p50", "p95", "max")


def build_report(
    events: Iterable[RunEvent], *, title: str, batch: str = "", tenant: str = DEFAULT_TENANT, total: int = 0
) -> str:
    """Return the page, smaller than 2 MB for the largest batch. The same events give the same page, even if events
    are repeated.

    `batch`, `tenant`: used in the commands on the page. `total`: number of items, if no event contains the number.
    """
    return build_page(title, build_sections(events, batch=batch, tenant=tenant, total=total))


def build_sections(
    batch_events: Iterable[RunEvent], *, batch: str = "", tenant: str = DEFAULT_TENANT, total: int = 0
) -> list[tuple[str, str, Markup]]:
    """Return the sections of the page as (id, heading, content). The sections use the classes of the page's style
    sheet.
    """
    report = _Report(total)
    for event in batch_events:
        report.add(event)
    return report.sections(batch, tenant)


class _Report:
    """Figures of a batch that its Progress does not store. They use about 20 MB for the largest batch."""

    def __init__(self, total: int) -> None:
        self._progress = BatchProgress(total)
        self._amounts: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._times: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self._calls: dict[str, array[float]] = {}
        self._queued: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self._errors: dict[str, int] = defaultdict(int)
        self._ended: list[tuple[float, str, int, str, str]] = []
        self._failed: dict[str, RunEnded] = {}
        self._started: dict[tuple[str, int], tuple[float, str]] = {}
        """Attempts without an end."""
        self._low = math.inf

    def add(self, event: RunEvent) -> None:
        """Count an event. A repeated event changes nothing."""
        self._low = min(limit_time(event.at), self._low)
        if not self._progress.add(event):
            return
        if (failed := self._failed.get(event.item)) is not None and event.attempt > failed.attempt:
            del self._failed[event.item]
        match event:
            case RunClaimed() if not event.is_resumed:
                self._started[event.item, event.attempt] = limit_time(event.at), event.run
                self._times["items in the queue"].append(max(0.0, event.waited_s))
            case RunReady():
                self._times["sandboxes and workspaces"].append(max(0.0, event.setup_s))
            case StepFinished():
                self._times["replies of the model"].append(max(0.0, event.model_s))
            case CallFinished():
                self._add_call(event)
            case RunRetried():
                started = self._started.pop((event.item, event.attempt - 1), None)
                if started is not None:
                    self._add_run(started[0], limit_time(event.at))
            case RunEnded():
                self._add_end(event)

    def _add_call(self, call: CallFinished) -> None:
        """Count a call. Above MAX_TOOLS, calls of further tools are counted together."""
        tool = call.result.name[:MAX_NAME_CHARS]
        if tool not in self._calls and len(self._calls) >= MAX_TOOLS:
            tool = OTHER_TOOLS
        self._calls.setdefault(tool, array("d")).append(max(0.0, call.seconds))
        self._queued[tool].append(max(0.0, call.result.clocks.queued_s))
        self._errors[tool] += call.result.error_code is not None

    def _add_end(self, end: RunEnded) -> None:
        """Count the end of an item."""
        at = limit_time(end.at)
        started, _ = self._started.pop((end.item, end.attempt), (limit_time(end.at - end.seconds), ""))
        self._low = min(started, self._low)
        if started < at:
            self._add_run(started, at)
        self._amounts["succeeded" if end.failure is None else "failed"].append((at, 1))
        if end.failure is not None and len(self._failed) < MAX_FAILED_ROWS:
            self._failed[end.item] = end
        self._amounts["tokens in"].append((at, end.usage.prompt_tokens))
        self._amounts["tokens out"].append((at, end.usage.completion_tokens))
        if end.cost is not None:
            self._amounts["cost"].append((at, end.cost))
        # An end that comes from a row has no duration.
        if end.seconds > 0:
            self._ended.append(
                (
                    end.seconds,
                    end.item,
                    end.attempt,
                    end.run,
                    end.failure.kind if end.failure is not None else "succeeded",
                )
            )

    def _add_run(self, started: float, ended: float) -> None:
        """Count a running item from its start to its end."""
        self._amounts["running"] += [(started, 1), (ended, -1)]

    def sections(self, batch: str, tenant: str) -> list[tuple[str, str, Markup]]:
        """Return the sections of the report as (id, heading, content)."""
        high = limit_time(self._progress.last_at)
        low = min(self._low, high)
        still = sorted(
            (started, item, attempt, run)
            for (item, attempt), (started, run) in self._started.items()
            if self._progress.latest(item) == (attempt, Stage.RUNNING)
        )
        self._amounts["running"] += [(started, 1) for started, *_ in still]
        snapshot = self._progress.snapshot(high)
        return [
            ("summary", "Summary", _summary(build_summary(snapshot, batch=batch or "ID", tenant=tenant), low)),
            *self._grades(),
            ("failures", "Failures", self._failures(snapshot)),
            ("time", "Over time", self._over_time(low, high)),
            ("tools", "Tools and waiting", self._tools()),
            ("cost", "Tokens and cost", self._tokens(snapshot, low, high)),
            ("slowest", "Slowest items", self._slowest_items(still, high)),
            ("notes", "Notes", _notes(snapshot)),
        ]

    def _grades(self) -> list[tuple[str, str, Markup]]:
        """Return the section about rewards; no section without graded items."""
        grades = self._progress.summarize_grades()
        if grades is None:
            return []
        note = (
            "Solved: reward 1. pass@k is the unbiased estimate, with Wilson's interval over the tasks. Items whose "
            "grader failed count as not solved."
        )
        return [
            ("grades", "Grades", join([table("Rewards", ("figure", "value"), format_grades(grades)), paragraph(note)]))
        ]

    def _failures(self, snapshot: ProgressSnapshot) -> Markup:
        """Return the section about failed items."""
        if not snapshot.failed:
            return paragraph("No item has failed.")
        latest = self._progress.latest
        listed = sorted(
            (end for end in self._failed.values() if latest(end.item) == (end.attempt, Stage.ENDED)),
            key=lambda end: (end.at, end.item),
        )
        rows = [
            (
                one_line(end.item, MAX_NAME_CHARS),
                end.failure.kind.value,
                one_line(end.failure.code, MAX_CODE_CHARS),
                str(end.attempt),
                format_time(end.at),
                end.failure.message,
            )
            for end in listed
            if end.failure is not None
        ]
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in snapshot.failures.items())
        columns = ("item", "kind", "code", "attempt", "ended", "message")
        title = f"Failed items: {len(listed):,} of {snapshot.failed:,}"
        more = (
            f"{snapshot.failed - len(listed):,} more failed items are not listed here; the error file has all of them."
        )
        return join(
            [
                paragraph(f"{snapshot.failed:,} failed: {kinds}. Items whose retry succeeded do not count."),
                _groups(snapshot),
                table(title, columns, rows, text_columns=(0, 1, 2, 4, 5), max_chars=MAX_CELL_CHARS),
                paragraph(more if snapshot.failed > len(listed) else ""),
            ]
        )

    def _over_time(self, low: float, high: float) -> Markup:
        """Return the section with the plots over time."""
        ends = self._lines(low, high, succeeded="done", failed="failed")
        if not ends and not self._amounts["running"]:
            return paragraph("No item has started yet.")
        parts = [paragraph(f"The time starts at {format_time(low)}.")]
        if ends:
            parts.append(figure(plot_lines("ends", "Ended items", ends, low, high), "Items that have ended, in total."))
        if running := self._lines(low, high, running="third"):
            plot = plot_lines("running", "Running items", running, low, high)
            parts.append(figure(plot, "Items that run at the same time."))
        return join(parts)

    def _tools(self) -> Markup:
        """Return the section about calls and waiting times."""
        ordered = sorted(self._calls.items(), key=lambda pair: (-len(pair[1]), pair[0]))
        calls = [
            (tool, *_spread(seconds), f"{self._errors[tool]:,}", format_seconds(_quantile(self._queued[tool], 0.95)))
            for tool, seconds in ordered
        ]
        waits = [(name, *_spread(seconds)) for name, seconds in sorted(self._times.items())]
        parts = [paragraph("" if calls else "No tool has been called.")]
        if calls:
            parts.append(table("Calls by tool", ("tool", *_TIMES, "errors", "queued p95"), calls))
            parts.append(
                paragraph("Time from the request to the result. Queued: the part of it until a worker took the call.")
            )
        if waits:
            parts.append(table("Waiting", ("for", *_TIMES), waits))
        return join(parts)

    def _tokens(self, snapshot: ProgressSnapshot, low: float, high: float) -> Markup:
        """Return the section about tokens and cost."""
        total = f"{format_count(snapshot.prompt_tokens)} in, {format_count(snapshot.completion_tokens)} out"
        cost = format_cost(snapshot.cost, snapshot.cost_unknown)
        parts = [paragraph(f"Tokens of all attempts: {total}. Cost of the attempts that have ended: {cost}.")]
        if snapshot.prompt_tokens and (lines := self._lines(low, high, tokens_in="other", tokens_out="third")):
            parts.append(figure(plot_lines("tokens", "Tokens", lines, low, high), "Tokens of ended items, in total."))
        if lines := self._lines(low, high, cost="done"):
            caption = "Cost of ended items, in total, in the currency of the prices."
            parts.append(figure(plot_lines("costs", "Cost", lines, low, high), caption))
        return join(parts)

    def _lines(self, low: float, high: float, **styles: str) -> list[Line]:
        """Return the lines that have points. An underscore in a name stands for a space."""
        named = [(name.replace("_", " "), style) for name, style in styles.items()]
        lines = [Line(name, style, add_up(self._amounts[name], low, high)) for name, style in named]
        return [line for line in lines if line.points]

    def _slowest_items(self, still: Sequence[tuple[float, str, int, str]], high: float) -> Markup:
        """Return the section about the slowest items."""
        ended = [
            (item, format_seconds(seconds), str(attempt), ending, run)
            for seconds, item, attempt, run, ending in heapq.nlargest(MAX_SLOWEST, self._ended)
        ]
        running = [
            (item, format_seconds(high - started), str(attempt), "running", run)
            for started, item, attempt, run in still[:MAX_SLOWEST]
        ]
        columns = ("item", "time", "attempt", "state", "run")
        parts = [
            table(caption, columns, rows, text_columns=(0, 3, 4))
            for caption, rows in (("Ended", ended), ("Running", running))
            if rows
        ]
        return join(parts) if parts else paragraph("No item has started yet.")


def _summary(s: Summary, low: float) -> Markup:
    """Return the table of totals, with warnings and next steps."""
    rows = [
        ("items", f"{s.total:,}"),
        ("succeeded", f"{s.done:,}"),
        ("failed", f"{s.failed:,}"),
        ("running", f"{s.running:,}"),
        ("queued", f"{s.queued:,}"),
        ("retried", f"{s.retried:,}"),
        ("resumed", f"{s.resumed:,}"),
        ("started", format_time(low)),
        ("time" if s.has_ended else "time so far", format_seconds(s.wall_s)),
        ("items a second", format_rate(s.items_per_s)),
        ("steps", f"{s.steps:,}"),
        ("calls", f"{s.calls:,} ({format_rate(s.calls_per_s)} a second)"),
        ("tokens", f"{format_count(s.prompt_tokens)} in, {format_count(s.completion_tokens)} out"),
        ("cost", format_cost(s.cost, s.cost_unknown)),
        ("sandbox CPU time", format_seconds(s.cpu_s)),
        ("sandbox time", format_seconds(s.sandbox_s)),
    ]
    steps = [element("li", text(sentence, 500)) for sentence in s.next]
    next_steps = [paragraph("What to do next:"), element("ul", *steps)] if steps else []
    warnings = [paragraph(f"Warning: {warning}") for warning in s.warnings]
    return join([*warnings, table("Totals", ("figure", "value"), rows), *next_steps])


def _groups(snapshot: ProgressSnapshot) -> Markup:
    """Return the table of failures by code."""
    rows = [
        (one_line(group.code, MAX_CODE_CHARS), group.kind.value, f"{group.count:,}", group.item, group.message)
        for group in snapshot.groups[:MAX_GROUP_ROWS]
    ]
    columns = ("code", "kind", "items", "example", "message")
    rest = snapshot.groups[MAX_GROUP_ROWS:]
    more = f"{sum(group.count for group in rest):,} more failed with {len(rest):,} other codes." if rest else ""
    return join(
        [table("Failures by code", columns, rows, text_columns=(0, 1, 3, 4), max_chars=MAX_CELL_CHARS), paragraph(more)]
    )


def _notes(snapshot: ProgressSnapshot) -> Markup:
    """Return the table of notices about the whole batch."""
    rows = [(format_time(note.at), note.message) for note in snapshot.notes]
    if not rows:
        return paragraph("There are none.")
    return table(
        "About the whole batch, the newest last", ("time", "note"), rows, text_columns=(0, 1), max_chars=MAX_CELL_CHARS
    )


def _spread(seconds: Sequence[float]) -> tuple[str, ...]:
    """Return the count, mean, median, 95th percentile and maximum as texts."""
    figures = (sum(seconds) / len(seconds), _quantile(seconds, 0.5), _quantile(seconds, 0.95), max(seconds))
    return (f"{len(seconds):,}", *(format_seconds(figure) for figure in figures))


def _quantile(seconds: Sequence[float], share: float) -> float:
    """Return the quantile by the nearest-rank method. `share`: 0 to 1."""
    return sorted(seconds)[max(0, math.ceil(share * len(seconds)) - 1)]
