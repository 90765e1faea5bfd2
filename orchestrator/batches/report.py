"""A batch as one HTML page that opens offline: what was done, what failed and why, how long it took, what it cost."""

from collections.abc import Iterable

from contract.tenancy import DEFAULT_TENANT
from orchestrator.batches.figures import (
    format_cost,
    format_count,
    format_eta,
    format_rate,
    format_seconds,
    format_time,
    one_line,
)
from orchestrator.batches.markup import Markup, element, join, text
from orchestrator.batches.progress import Progress
from orchestrator.batches.report_page import build_page, figure, paragraph, table
from orchestrator.batches.report_plots import Line, plot_bars, plot_lines, plot_spans, plot_strips
from orchestrator.batches.report_series import DONE, FAILED, RETRIED, RUNNING, Spans, TimeSeries, within_time
from orchestrator.batches.snapshot import Snapshot, Spread
from orchestrator.batches.summary import Summary, build_summary
from store.batches import BatchEvent, ItemDone, ItemRetried, ItemStarted, StepDone

MAX_FAILED_ROWS = 500
MAX_TOOLS = 15
MAX_GROUP_ROWS = 50
MAX_CELL_CHARS = 240
_NANO = 10**9


def build_report(
    events: Iterable[BatchEvent], *, title: str, batch: str = "", tenant: str = DEFAULT_TENANT, total: int = 0
) -> str:
    """The page, below 2 MB for the largest batch. Reads `events` once, in any order, also with repetitions; the same
    ones give the same page.

    `batch`: its id and `tenant`: whose it is, for the commands that the page names. `total`: how many items there are,
    where no event tells it.
    """
    return build_page(title, build_sections(events, batch=batch, tenant=tenant, total=total))


def build_sections(
    batch_events: Iterable[BatchEvent], *, batch: str = "", tenant: str = DEFAULT_TENANT, total: int = 0
) -> list[tuple[str, str, Markup]]:
    """What stands on that page, for others to hold it: (id, heading, content) each, in the classes of its style
    sheet.
    """
    story = _Story(total)
    for batch_event in batch_events:
        story.add(batch_event)
    return story.sections(batch, tenant)


class _Story:
    """What is kept of the batch_events: some MB for the largest batch."""

    def __init__(self, total: int) -> None:
        self._progress = Progress(total, max_failed_rows=MAX_FAILED_ROWS)
        self._series = TimeSeries()
        self._spans = Spans()
        self._begun: dict[tuple[str, int], float] = {}
        """Attempts of which no end has been heard."""
        self._low: float | None = None

    def add(self, batch_event: BatchEvent) -> None:
        at = within_time(batch_event.at)
        self._low = at if self._low is None else min(at, self._low)
        if not self._progress.add(batch_event):
            return
        match batch_event:
            case ItemStarted() if not batch_event.is_resumed:
                self._begun[batch_event.item, batch_event.attempt] = at
            case StepDone():
                self._series.add("in", at, batch_event.prompt_tokens)
                self._series.add("out", at, batch_event.completion_tokens)
            case ItemRetried():
                begin = self._begun.pop((batch_event.item, batch_event.attempt - 1), None)
                if begin is not None:
                    self._spans.add(begin, at, RETRIED, batch_event.item)
            case ItemDone():
                self._end(batch_event)

    def _end(self, end: ItemDone) -> None:
        at = within_time(end.at)
        begin = self._begun.pop((end.item, end.attempt), within_time(end.at - end.seconds))
        self._low = min(begin, at if self._low is None else self._low)
        if begin < at:
            self._spans.add(begin, at, DONE if end.failure is None else FAILED, end.item)
        self._series.add("done" if end.failure is None else "failed", at, 1)
        if end.cost is not None:
            self._series.add("cost", at, round(end.cost * _NANO))

    def sections(self, batch: str, tenant: str) -> list[tuple[str, str, Markup]]:
        high = within_time(self._progress.last_at)
        low = high if self._low is None else self._low
        snapshot = self._progress.snapshot(high)
        running = {(item.item, item.attempt) for item in self._progress.running_items(high)}
        for (item, attempt), begin in sorted(self._begun.items()):
            if (item, attempt) in running:
                self._spans.add(begin, high, RUNNING, item)
        summary = build_summary(snapshot, batch=batch or "ID", tenant=tenant)
        return [
            ("summary", "Summary", _summary(summary, low)),
            ("failures", "Failures", self._failures(snapshot)),
            ("time", "Over time", self._over_time(low, high)),
            ("tools", "Tools", self._tools(snapshot)),
            ("waiting", "Waiting", self._waiting(snapshot)),
            ("cost", "Tokens and cost", self._tokens(snapshot, low, high)),
            ("slowest", "Slowest items", _slowest(snapshot)),
            ("notes", "Notes", _notes(snapshot)),
        ]

    def _failures(self, snapshot: Snapshot) -> Markup:
        if not snapshot.failed:
            return paragraph("Nothing has failed.")
        bars = plot_bars(
            "kinds", "Failed items by kind", [(kind.value, count) for kind, count in snapshot.failures.items()]
        )
        shown = self._progress.failed_items()[:MAX_FAILED_ROWS]
        rows = [
            (
                one_line(item.item, 120),
                item.kind.value,
                one_line(item.code, 64),
                str(item.attempt),
                format_time(item.at),
                item.message,
            )
            for item in shown
        ]
        rest = snapshot.failed - len(shown)
        columns = ("item", "kind", "code", "attempt", "ended", "message")
        return join(
            [
                figure(
                    bars,
                    "Items that stand as failed, by whose fault it is. Those that succeeded when they were tried again "
                    "are not counted.",
                ),
                _groups(snapshot),
                table(
                    f"Failed items: {len(shown):,} of {snapshot.failed:,}",
                    columns,
                    rows,
                    words=(0, 1, 2, 4, 5),
                    most=MAX_CELL_CHARS,
                ),
                paragraph(
                    f"{rest:,} more failed items are not listed here; the batch's error file has them all."
                    if rest
                    else ""
                ),
            ]
        )

    def _over_time(self, low: float, high: float) -> Markup:
        if not len(self._spans):
            return paragraph("No item has been worked yet.")
        ends = [
            Line("succeeded", "done", self._series.added_up("done")),
            Line("failed", "failed", self._series.added_up("failed")),
        ]
        running = [Line("running", "third", self._spans.running(low, high))]
        parts = [
            figure(
                plot_spans("spans", "Items as they ran", self._spans, low, high),
                "When each item ran, in the order in which they began.",
            ),
            figure(
                plot_lines("ends", "Ends of items, added up", ends, low, high),
                "How many items had ended, tries that were repeated counted each.",
            ),
            figure(
                plot_lines("running", "Items that ran at once", running, low, high, is_stepped=False),
                "How many items ran at once, in the mean of 1/240 of the time.",
            ),
        ]
        return join([paragraph(f"The time is counted from {format_time(low)}."), *parts])

    def _tools(self, snapshot: Snapshot) -> Markup:
        if not snapshot.tools:
            return paragraph("No tool has been called.")
        names = [tool.tool for tool in snapshot.tools[:MAX_TOOLS]]
        strips = plot_strips(
            "latency", "Seconds of calls by tool", [(name, self._progress.tools.rows[name].seconds) for name in names]
        )
        rows = [
            (tool.tool, f"{tool.calls:,}", f"{tool.errors:,}", *_times(tool.seconds), format_seconds(tool.queued.p95_s))
            for tool in snapshot.tools
        ]
        columns = ("tool", "calls", "errors", "mean", "p50", "p95", "max", "queued p95")
        caption = "From request to result, on a logarithmic axis: line p50, dashed p95, dot the maximum."
        more = (
            f" The {MAX_TOOLS} tools that were called most; the table has all."
            if len(snapshot.tools) > MAX_TOOLS
            else ""
        )
        return join([figure(strips, caption + more), table("Calls by tool", columns, rows)])

    def _waiting(self, snapshot: Snapshot) -> Markup:
        tools = self._progress.tools.rows
        times = [("items", self._progress.waits)] if snapshot.waits.count else []
        times += [(tool.tool, tools[tool.tool].queued) for tool in snapshot.tools[:MAX_TOOLS]]
        if not times:
            return paragraph("Nothing has waited yet.")
        rows = [
            (name, f"{spread.count:,}", *_times(spread))
            for name, spread in (
                ("items in the queue, before they began", snapshot.waits),
                ("sandboxes and workspaces, until they were there", snapshot.setups),
                ("replies of the model", snapshot.replies),
            )
        ]
        strips = plot_strips("waits", "Seconds of waiting", times)
        caption = (
            "Items: in the queue before each first begin of an attempt. Tools: until a worker took the call. Line p50, "
            "dashed p95, dot the maximum."
        )
        return join(
            [
                figure(strips, caption),
                table("What was waited for", ("what", "times", "mean", "p50", "p95", "max"), rows),
            ]
        )

    def _tokens(self, snapshot: Snapshot, low: float, high: float) -> Markup:
        lines = [
            Line("tokens in", "other", self._series.added_up("in")),
            Line("tokens out", "third", self._series.added_up("out")),
        ]
        parts = [paragraph("No step has told its tokens.")]
        if any(line.points for line in lines):
            parts = [
                figure(
                    plot_lines("tokens", "Tokens, added up", lines, low, high),
                    "Tokens of the steps that were told, added up.",
                )
            ]
        costs = [(at, cost / _NANO) for at, cost in self._series.added_up("cost")]
        if not costs:
            return join([*parts, paragraph("No prices are known, so there is no cost.")])
        told = (
            "Cost of the attempts that have ended, in the currency of the prices; "
            f"{format_cost(snapshot.cost, snapshot.cost_unknown)} in all."
        )
        parts.append(figure(plot_lines("costs", "Cost, added up", [Line("cost", "done", costs)], low, high), told))
        return join(parts)


def _summary(s: Summary, low: float) -> Markup:
    facts = [
        ("items", f"{s.total:,}"),
        ("succeeded", f"{s.done:,}"),
        ("failed", f"{s.failed:,}"),
        ("running", f"{s.running:,}"),
        ("queued", f"{s.queued:,}"),
        ("tried again", f"{s.retried:,}"),
        ("resumed", f"{s.resumed:,}"),
        ("began", format_time(low)),
        ("took so far" if not s.has_ended else "took", format_seconds(s.wall_s)),
        *([] if s.has_ended else [("ETA", format_eta(s.eta_s))]),
        ("steps", f"{s.steps:,}"),
        ("calls", f"{s.calls:,} ({format_rate(s.calls_per_s_overall)} a second)"),
        ("tokens", f"{format_count(s.prompt_tokens)} in, {format_count(s.completion_tokens)} out"),
        ("cost", format_cost(s.cost, s.cost_unknown)),
    ]
    steps = [element("li", text(sentence, 500)) for sentence in s.next]
    todo = [paragraph("What to do next:"), element("ul", *steps)] if steps else []
    warnings = [paragraph(f"Warning: {warning}") for warning in s.warnings]
    return join([*warnings, table("Totals", ("what", "how much"), facts), *todo])


def _groups(snapshot: Snapshot) -> Markup:
    rows = [
        (one_line(group.code, 64), group.kind.value, f"{group.count:,}", one_line(group.item, 120), group.message)
        for group in snapshot.groups[:MAX_GROUP_ROWS]
    ]
    columns = ("code", "kind", "items", "for example", "message")
    rest = snapshot.groups[MAX_GROUP_ROWS:]
    more = f"{sum(group.count for group in rest):,} more failed with {len(rest):,} other codes." if rest else ""
    return join([table("Failures by code", columns, rows, words=(0, 1, 3, 4), most=MAX_CELL_CHARS), paragraph(more)])


def _slowest(snapshot: Snapshot) -> Markup:
    if not snapshot.slowest and not snapshot.slowest_running:
        return paragraph("No item has been worked yet.")
    ended = [
        (item.item, format_seconds(item.seconds), item.failure or "succeeded", str(item.attempt), item.run)
        for item in snapshot.slowest
    ]
    running = [
        (item.item, format_seconds(item.age_s), item.does, str(item.attempt), item.run)
        for item in snapshot.slowest_running
    ]
    parts = [(caption, rows) for caption, rows in (("Ended", ended), ("Still running", running)) if rows]
    columns = ("item", "time", "how", "attempt", "run")
    return join([table(caption, columns, rows, words=(0, 2, 4)) for caption, rows in parts])


def _notes(snapshot: Snapshot) -> Markup:
    rows = [(format_time(note.at), note.message) for note in snapshot.notes]
    return (
        table("Of the batch as a whole, the newest last", ("when", "what"), rows, words=(0, 1))
        if rows
        else paragraph("There are none.")
    )


def _times(spread: Spread) -> tuple[str, str, str, str]:
    mean, p50, p95, most = (
        format_seconds(value) for value in (spread.mean_s, spread.p50_s, spread.p95_s, spread.max_s)
    )
    return mean, p50, p95, most
