"""Report of a batch as one HTML page that works offline: results, failures, times, tokens and cost."""

import heapq
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from toolcrew.contract.calls import MAX_NAME_CHARS
from toolcrew.contract.plurals import plural
from toolcrew.contract.run_events import (
    CallFinished,
    RunClaimed,
    RunEnded,
    RunEvent,
    RunReady,
    RunRetried,
    StepFinished,
)
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.orchestrator.batches.grades import format_grades
from toolcrew.orchestrator.batches.progress import BatchProgress, Phase, ProgressSnapshot
from toolcrew.orchestrator.batches.report_plots import Plot, add_up, build_plot, limit_time
from toolcrew.orchestrator.batches.summary import Summary, build_summary
from toolcrew.orchestrator.offline_pages import load_template, render_page
from toolcrew.orchestrator.terminal.figures import (
    format_cost,
    format_count,
    format_rate,
    format_seconds,
    format_time,
)

MAX_FAILED_ROWS = 500
MAX_GROUP_ROWS = 50
MAX_SLOWEST = 20
MAX_TOOLS = 200
"""Limit of the tools that the report lists. A model can request tools that do not exist, with any name."""
OTHER_TOOLS = "(other tools)"
MAX_CELL_CHARS = 240
MAX_CODE_CHARS = 64
_TIMES = ("times", "mean", "p50", "p95", "max")


@dataclass(frozen=True)
class Table:
    """A table of untrusted text. `text_columns`: columns that contain text and not numbers. `max_chars`: limit of the
    text in a cell. The first column is the heading of the row.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Sequence[int] = (0,)
    max_chars: int = 200


Block = str | Table | Plot | list[str]
"""A paragraph, a table, a plot or a list of sentences."""


@dataclass(frozen=True)
class Section:
    """A section of the report. `id`: the id of its HTML element."""

    id: str
    heading: str
    blocks: Sequence[Block]

    def to_html(self) -> str:
        """Return the content as HTML, with the classes of the pages' style sheets."""
        return str(load_template("report_blocks.html").make_module().blocks(self))  # type: ignore[attr-defined]


def build_report(
    events: Iterable[RunEvent], *, title: str, batch: str = "", tenant: str = DEFAULT_TENANT, total: int = 0
) -> str:
    """Return the page, smaller than 2 MB for the largest batch. The same events give the same page, even if events
    are repeated.

    `batch`, `tenant`: used in the commands on the page. `total`: number of items, if no event contains the number.
    """
    return render_page(
        "report.html", title=title, sections=build_sections(events, batch=batch, tenant=tenant, total=total)
    )


def build_sections(
    batch_events: Iterable[RunEvent], *, batch: str = "", tenant: str = DEFAULT_TENANT, total: int = 0
) -> list[Section]:
    """Return the sections of a batch's report, in order. The parameters are those of `build_report`."""
    report = _Report(total)
    for event in batch_events:
        report.add(event)
    return report.sections(batch, tenant)


class _Report:
    """Data for the report that BatchProgress does not store, such as the slowest items. It uses about 20 MB for the
    largest batch.
    """

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
        """Attempts that have started and not ended."""
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

    def sections(self, batch: str, tenant: str) -> list[Section]:
        """Return the sections of the report."""
        high = limit_time(self._progress.last_at)
        low = min(self._low, high)
        still = sorted(
            (started, item, attempt, run)
            for (item, attempt), (started, run) in self._started.items()
            if self._progress.latest(item) == (attempt, Phase.RUNNING)
        )
        self._amounts["running"] += [(started, 1) for started, *_ in still]
        snapshot = self._progress.snapshot(high)
        return [
            Section("summary", "Summary", _summary(build_summary(snapshot, batch=batch or "ID", tenant=tenant), low)),
            *self._grades(),
            Section("failures", "Failures", self._failures(snapshot)),
            Section("time", "Over time", self._over_time(low, high)),
            Section("tools", "Tools and waiting", self._tools()),
            Section("cost", "Tokens and cost", self._tokens(snapshot, low, high)),
            Section("slowest", "Slowest items", self._slowest_items(still, high)),
            Section("notes", "Notes", _notes(snapshot)),
        ]

    def _grades(self) -> list[Section]:
        """Return the section about rewards; no section without graded items."""
        grades = self._progress.summarize_grades()
        if grades is None:
            return []
        note = (
            "Solved: reward 1. pass@k is the unbiased estimate, with Wilson's interval over the tasks. Items whose "
            "grader failed count as not solved."
        )
        return [Section("grades", "Grades", [Table("Rewards", ("figure", "value"), format_grades(grades)), note])]

    def _failures(self, snapshot: ProgressSnapshot) -> list[Block]:
        """Return the section about failed items."""
        if not snapshot.failed:
            return ["No item has failed."]
        latest = self._progress.latest
        listed = sorted(
            (end for end in self._failed.values() if latest(end.item) == (end.attempt, Phase.ENDED)),
            key=lambda end: (end.at, end.item),
        )
        rows = [
            (
                end.item,
                end.failure.kind.value,
                end.failure.code[:MAX_CODE_CHARS],
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
        hidden = snapshot.failed - len(listed)
        more = f"{hidden:,} more failed {plural(hidden, 'item is', 'items are')} not listed here; "
        more += "the error file has all of them."
        return [
            f"{snapshot.failed:,} failed: {kinds}. Items whose retry succeeded do not count.",
            *_groups(snapshot),
            Table(title, columns, rows, (0, 1, 2, 4, 5), MAX_CELL_CHARS),
            *([more] if snapshot.failed > len(listed) else []),
        ]

    def _over_time(self, low: float, high: float) -> list[Block]:
        """Return the section with the plots over time."""
        plots = [
            *self._plot("ends", "Ended items", "Items that have ended, in total.", low, high, succeeded="done",
                        failed="failed"),
            *self._plot("running", "Running items", "Items that run at the same time.", low, high, running="third"),
        ]  # fmt: skip
        return [f"The time starts at {format_time(low)}.", *plots] if plots else ["No item has started yet."]

    def _tools(self) -> list[Block]:
        """Return the section about calls and waiting times."""
        ordered = sorted(self._calls.items(), key=lambda pair: (-len(pair[1]), pair[0]))
        calls = [
            (tool, *_spread(seconds), f"{self._errors[tool]:,}", format_seconds(_quantile(self._queued[tool], 0.95)))
            for tool, seconds in ordered
        ]
        waits = [(name, *_spread(seconds)) for name, seconds in sorted(self._times.items())]
        blocks: list[Block] = ["No tool has been called."]
        if calls:
            note = "Time from the request to the result. Queued: the part of it until a worker took the call."
            blocks = [Table("Calls by tool", ("tool", *_TIMES, "errors", "queued p95"), calls), note]
        return [*blocks, *([Table("Waiting", ("for", *_TIMES), waits)] if waits else [])]

    def _tokens(self, snapshot: ProgressSnapshot, low: float, high: float) -> list[Block]:
        """Return the section about tokens and cost."""
        total = f"{format_count(snapshot.prompt_tokens)} in, {format_count(snapshot.completion_tokens)} out"
        cost = format_cost(snapshot.cost, snapshot.cost_unknown)
        blocks: list[Block] = [f"Tokens of all attempts: {total}. Cost of the attempts that have ended: {cost}."]
        if snapshot.prompt_tokens:
            caption = "Tokens of ended items, in total."
            blocks += self._plot("tokens", "Tokens", caption, low, high, tokens_in="other", tokens_out="third")
        caption = "Cost of ended items, in total, in the currency of the prices."
        return [*blocks, *self._plot("costs", "Cost", caption, low, high, cost="done")]

    def _plot(self, id_: str, title: str, caption: str, low: float, high: float, **styles: str) -> list[Plot]:
        """Return the plot of these amounts over time, or nothing if there are no amounts. The names of the arguments
        become labels, with spaces in place of underscores.
        """
        named = {name.replace("_", " "): style for name, style in styles.items()}
        lines = {name: (style, add_up(self._amounts[name], low, high)) for name, style in named.items()}
        lines = {name: line for name, line in lines.items() if line[1]}
        return [build_plot(id_, title, caption, lines, low, high)] if lines else []

    def _slowest_items(self, still: Sequence[tuple[float, str, int, str]], high: float) -> list[Block]:
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
        tables = [
            Table(caption, columns, rows, (0, 3, 4))
            for caption, rows in (("Ended", ended), ("Running", running))
            if rows
        ]
        return [*tables] or ["No item has started yet."]


def _summary(s: Summary, low: float) -> list[Block]:
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
    next_steps: list[Block] = ["What to do next:", list(s.next)] if s.next else []
    warnings = [f"Warning: {warning}" for warning in s.warnings]
    return [*warnings, Table("Totals", ("figure", "value"), rows), *next_steps]


def _groups(snapshot: ProgressSnapshot) -> list[Block]:
    """Return the table of failures by code."""
    rows = [
        (group.code[:MAX_CODE_CHARS], group.kind.value, f"{group.count:,}", group.item, group.message)
        for group in snapshot.groups[:MAX_GROUP_ROWS]
    ]
    rest = snapshot.groups[MAX_GROUP_ROWS:]
    more = f"{sum(group.count for group in rest):,} more failed with {len(rest):,} other {plural(len(rest), 'code')}."
    columns = ("code", "kind", "items", "example", "message")
    return [Table("Failures by code", columns, rows, (0, 1, 3, 4), MAX_CELL_CHARS), *([more] if rest else [])]


def _notes(snapshot: ProgressSnapshot) -> list[Block]:
    """Return the table of notices about the whole batch."""
    rows = [(format_time(note.at), note.message) for note in snapshot.notes]
    caption = "About the whole batch, the newest last"
    return [Table(caption, ("time", "note"), rows, (0, 1), MAX_CELL_CHARS)] if rows else ["There are none."]


def _spread(seconds: Sequence[float]) -> tuple[str, ...]:
    """Return the count, mean, median, 95th percentile and maximum as texts."""
    figures = (sum(seconds) / len(seconds), _quantile(seconds, 0.5), _quantile(seconds, 0.95), max(seconds))
    return (f"{len(seconds):,}", *(format_seconds(figure) for figure in figures))


def _quantile(seconds: Sequence[float], share: float) -> float:
    """Return the quantile by the nearest-rank method. `share`: 0 to 1."""
    return sorted(seconds)[max(0, math.ceil(share * len(seconds)) - 1)]
