"""The lines that a live display of a batch shows, for any width and height; what matters most is shown first and
dropped last.
"""

import textwrap

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from orchestrator.batches.figures import (
    MAX_NOTE_CHARS,
    format_cost,
    format_count,
    format_eta,
    format_rate,
    format_seconds,
    one_line,
)
from orchestrator.batches.snapshot import Snapshot

MAX_SHOWN_RUNNING = 8
MAX_SHOWN_TOOLS = 8
MAX_NOTE_LINES = 4
_TIME_CELLS = 13
_NAME_CELLS = 60
"""At most: figures far from their names are read on the wrong line."""


def build_screen(snapshot: Snapshot, batch: str, width: int, height: int) -> list[Text]:
    """At most `height` lines, none wider than `width`."""
    head = [_bar(snapshot, width), *_wrap(_counts(snapshot), width), *_wrap(_figures(snapshot), width)]
    title = Text(f"batch {one_line(batch)}", style="bold")
    head = [title, *head, *_note(snapshot, width)]
    room = height - len(head)
    blocks = []
    for block in (_running(snapshot, width), _tools(snapshot, width)):
        # A heading alone says nothing.
        shown = block[: max(0, room)] if room >= 2 else []
        blocks += shown
        room -= len(shown)
    return [_fit(line, width) for line in [*head, *blocks]][: max(1, height)]


def _bar(s: Snapshot, width: int) -> Text:
    share = s.ended / s.total if s.total else 0.0
    # Cut, not rounded: 100 % is said when all have ended.
    label = f" {int(share * 1000) / 10:5.1f} %"
    cells = max(1, width - len(label))
    failed = _cells(s.failed, s.total, cells)
    done = min(cells - failed, _cells(s.done, s.total, cells))
    running = min(cells - failed - done, _cells(s.running, s.total, cells))
    bar = Text()
    for count, character, style in ((done, "█", "green"), (failed, "█", "red"), (running, "▒", "yellow")):
        bar.append(character * count, style=style)
    bar.append("░" * (cells - done - failed - running), style="dim")
    return bar.append(label)


def _cells(count: int, total: int, cells: int) -> int:
    """Something is seen of whatever is there."""
    return max(1, count * cells // total) if count and total else 0


def _counts(s: Snapshot) -> list[Text]:
    parts = [
        Text(f"{s.done:,} of {s.total:,} done", style="green"),
        Text(f"{s.failed:,} failed", style="red" if s.failed else "dim"),
        *(Text(f"{count:,} {kind}", style="red") for kind, count in s.failures.items()),
        Text(f"{s.running:,} running", style="yellow"),
        Text(f"{s.queued:,} queued"),
    ]
    return [
        *parts,
        *(
            Text(f"{count:,} {word}", style="dim")
            for count, word in ((s.retried, "tried again"), (s.resumed, "resumed"))
            if count
        ),
    ]


def _figures(s: Snapshot) -> list[Text]:
    return [
        Text(f"ETA {format_eta(s.eta_s)}", style="bold"),
        Text(f"{format_seconds(s.wall_s)} so far"),
        Text(f"{s.calls:,} calls"),
        Text(f"{format_rate(s.calls_per_s)} calls/s now"),
        Text(f"{format_rate(s.calls_per_s_overall)} overall"),
        Text(f"tokens {format_count(s.prompt_tokens)} in"),
        Text(f"{format_count(s.completion_tokens)} out"),
        Text(f"cost {format_cost(s.cost, s.cost_unknown)}"),
    ]


def _wrap(parts: list[Text], width: int) -> list[Text]:
    """Side by side as far as there is room; a part is never broken."""
    lines = [Text()]
    for part in parts:
        if lines[-1].cell_len and lines[-1].cell_len + 2 + part.cell_len > width:
            lines.append(Text())
        if lines[-1].cell_len:
            lines[-1].append("  ")
        lines[-1].append_text(part)
    return lines


def _note(s: Snapshot, width: int) -> list[Text]:
    """What was said last of the batch as a whole: what it waits for, for one."""
    told = one_line(s.notes[-1].message, MAX_NOTE_CHARS) if s.notes else ""
    lines = textwrap.wrap(told, max(1, width))
    cut = [f"{lines[MAX_NOTE_LINES - 1]} ..."] if len(lines) > MAX_NOTE_LINES else lines[MAX_NOTE_LINES - 1 :]
    return [Text(line, style="magenta") for line in (*lines[: MAX_NOTE_LINES - 1], *cut)]


def _running(s: Snapshot, width: int) -> list[Text]:
    if not s.slowest_running:
        return []
    shown = s.slowest_running[:MAX_SHOWN_RUNNING]
    name_cells = max(8, min(_NAME_CELLS, width - _TIME_CELLS - (26 if width >= 60 else 0)))
    rows = []
    for item in shown:
        row = Text(f"{_column(item.item, name_cells)}{format_seconds(item.age_s):>{_TIME_CELLS}}")
        rows.append(row.append(f"  {one_line(item.does)}", style="dim") if width >= 60 else row)
    return [Text("running longest", style="bold"), *rows]


def _tools(s: Snapshot, width: int) -> list[Text]:
    if not s.tools:
        return []
    is_wide = width >= 76
    titles = ("calls", "errors", "p50", "p95", "max", "queued p95") if is_wide else ("calls", "p50", "p95")
    cells = 11 if is_wide else 9
    name_cells = max(8, min(_NAME_CELLS, width - cells * len(titles)))
    rows = [Text(_column("tool", name_cells) + "".join(f"{title:>{cells}}" for title in titles), style="bold")]
    for tool in s.tools[:MAX_SHOWN_TOOLS]:
        p50, p95, most = (
            _short_seconds(value) for value in (tool.seconds.p50_s, tool.seconds.p95_s, tool.seconds.max_s)
        )
        calls, errors = format_count(tool.calls), format_count(tool.errors)
        figures = (calls, errors, p50, p95, most, _short_seconds(tool.queued.p95_s)) if is_wide else (calls, p50, p95)
        rows.append(Text(_column(tool.tool, name_cells) + "".join(f"{figure:>{cells}}" for figure in figures)))
    return rows


def _short_seconds(seconds: float) -> str:
    return (
        format_seconds(seconds)
        if seconds < 60
        else f"{seconds / 60:.0f} min"
        if seconds < 36_000
        else f"{seconds / 3600:.0f} h"
    )


def _column(text: str, cells: int) -> str:
    """A stranger's text in exactly so many cells, with a gap after it."""
    line = one_line(text)
    if cell_len(line) > cells - 1:
        line = set_cell_size(line, cells - 2) + "…"
    return set_cell_size(line, cells)


def _fit(line: Text, width: int) -> Text:
    line.truncate(max(1, width), overflow="ellipsis")
    line.no_wrap, line.end = True, ""
    return line
