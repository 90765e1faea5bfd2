"""The lines in which `toolcrew top` shows a deployment, for any width and height: of each table the busiest rows, and
how many there are more.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from contract.clock import format_instant
from orchestrator.batches.figures import MAX_NOTE_CHARS, format_count, format_seconds, one_line
from store.overview import Overview

GIB = 1024**3
View = Literal["all", "hosts", "queues", "tenants", "batches"]
VIEWS: tuple[View, ...] = ("all", "hosts", "queues", "tenants", "batches")
KEYS = "q ends  left, right: one table  up, down: its rows"
_NAME_CELLS = 48
"""At most: figures far from their names are read on the wrong line."""
_STYLES = {
    "serving": "green",
    "unhealthy": "red",
    "draining": "yellow",
    "restarting": "yellow",
    "paused": "yellow",
    "unreadable": "red",
}


@dataclass(frozen=True)
class Table:
    """Rows of as many cells as there are titles; the first is a name, of whatever length."""

    titles: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Shown:
    """What is on the screen: all tables, or one of them from its row `offset` on. `trouble`: why what is shown is not
    of now.
    """

    overview: Overview | None
    trouble: str = ""
    view: View = "all"
    offset: int = 0


def build_overview_screen(shown: Shown, width: int, height: int, *, keys: str = KEYS) -> list[Text]:
    """At most `height` lines, none wider than `width`."""
    head = _head(shown, width)
    if shown.overview is None:
        return [_fit(line, width) for line in head][:height]
    tables = _tables(shown.overview)
    room = max(2, height - len(head) - (1 if keys else 0))
    if shown.view == "all":
        body = _all_tables(tuple(tables.values()), width, room)
    else:
        body = _one_table(tables[shown.view], shown.offset, width, room)
    foot = [Text(f"{keys}    {shown.view}", style="dim")] if keys else []
    return [_fit(line, width) for line in [*head, *body, *foot]][: max(1, height)]


def count_rows(overview: Overview, view: View) -> int:
    """Of the table that the view shows alone."""
    return 0 if view == "all" else len(_tables(overview)[view].rows)


def _head(shown: Shown, width: int) -> list[Text]:
    seen = shown.overview
    told = one_line(shown.trouble, MAX_NOTE_CHARS)
    trouble = [Text(line, style="bold red") for line in textwrap.wrap(told, max(1, width))]
    if seen is not None and not seen.hosts:
        trouble.append(Text("no worker reports: start one (toolcrew worker start)", style="bold yellow"))
    if seen is None:
        return trouble or [Text("asking Redis ...", style="dim")]
    title = Text.assemble((one_line(seen.deployment), "bold"), f"  {format_instant(seen.at)[11:]}")
    title.append(f"  {seen.slots_in_use}/{seen.slots} in use  {format_count(seen.waiting)} waiting")
    title.append(f"  {format_count(seen.approvals)} approvals", style="bold yellow" if seen.approvals else "")
    title.append(f"  {format_count(seen.running)} runs  {format_count(seen.sessions)} sessions")
    return [title, *trouble]


def _tables(seen: Overview) -> dict[str, Table]:
    hosts = [
        (
            f"{report.host} ({report.kind})",
            report.state,
            f"{report.busy}/{report.slots}",
            f"{report.sessions}/{report.max_sessions}" if report.kind == "sandbox" else "-",
            f"{report.sandboxes}/{report.max_sandboxes}" if report.kind == "sandbox" else "-",
            f"{report.memory_free_bytes / GIB:.1f} G",
            f"{report.disk_free_bytes / GIB:.1f} G" if report.kind == "sandbox" else "-",
        )
        for report in seen.hosts
    ]
    queues = [
        (
            one.queue,
            f"{one.slots_in_use}/{one.slots}",
            format_count(one.held),
            format_count(one.length),
            format_count(one.waiting),
            _age(one.oldest_s),
        )
        for one in seen.queues
    ]
    tenants = [
        (
            one.tenant,
            "unreadable" if one.trouble else "paused" if one.is_paused else "",
            f"{one.held}/{one.in_flight}",
            format_count(one.waiting),
            f"{one.share:.0%}",
            f"{one.fair_share:.0%}",
            f"{one.weight:g}",
        )
        for one in seen.tenants
    ]
    batches: list[tuple[str, ...]] = [
        (
            f"{one.tenant}/{one.batch}",
            one.state.replace("_", " "),
            f"{format_count(one.succeeded + one.failed)}/{format_count(one.total)}",
            format_count(one.failed),
            format_count(one.running),
            format_count(one.waiting),
        )
        for one in seen.batches
    ]
    if seen.batch_count > len(batches):
        batches.append((f"and {seen.batch_count - len(batches)} batches more (toolcrew batch ls)", *[""] * 5))
    return {
        "hosts": Table(("host", "state", "running", "sessions", "sandboxes", "memory", "disk"), hosts),
        "queues": Table(("queue", "slots", "in flight", "messages", "waiting", "oldest"), queues),
        "tenants": Table(("tenant", "", "in flight", "waiting", "share", "fair", "weight"), tenants),
        "batches": Table(("batch", "state", "ended", "failed", "running", "waiting"), batches),
    }


def _all_tables(tables: Sequence[Table], width: int, room: int) -> list[Text]:
    """Room goes row by row to the table that has fewest; a table is a line of titles, its rows and an empty line."""
    present = [table for table in tables if table.rows]
    while present and 3 * len(present) > room + 1:
        present.pop()
    given = dict.fromkeys(range(len(present)), 1)
    left = room + 1 - 3 * len(present)
    while left > 0 and (short := [at for at in given if given[at] < len(present[at].rows)]):
        given[min(short, key=lambda at: given[at])] += 1
        left -= 1
    lines: list[Text] = []
    for at, table in enumerate(present):
        lines += [*_one_table(table, 0, width, given[at] + 1), Text()]
    return lines[:-1]


def _one_table(table: Table, offset: int, width: int, room: int) -> list[Text]:
    """From the row `offset` on, in so many lines, titles included."""
    cells = [max(map(cell_len, column)) for column in zip(table.titles, *table.rows, strict=True)]
    first = max(8, min(max(cells[0], 4), _NAME_CELLS, width - sum(cell + 2 for cell in cells[1:])))
    widths = [first, *cells[1:]]
    rows = table.rows[offset:]
    fits = max(0, room - 1)
    more = len(rows) - fits
    shown = rows if more <= 0 else rows[: max(0, fits - 1)] if fits > 1 else rows[:fits]
    lines = [
        Text(
            "  ".join(
                _cell(title, cell, is_name=at == 0)
                for at, (title, cell) in enumerate(zip(table.titles, widths, strict=True))
            )
        )
    ]
    lines[0].stylize("bold cyan")
    lines += [_row(row, widths) for row in shown]
    if more > 0 and fits > 1:
        lines.append(Text(f"and {len(rows) - len(shown)} more", style="dim"))
    return lines


def _row(row: tuple[str, ...], widths: Sequence[int]) -> Text:
    line = Text()
    for at, (cell, width) in enumerate(zip(row, widths, strict=True)):
        line.append("  " if at else "").append(_cell(cell, width, is_name=at == 0), style=_STYLES.get(cell, ""))
    return line


def _cell(text: str, cells: int, *, is_name: bool) -> str:
    """A stranger's text in exactly so many cells: names to the left, figures to the right."""
    line = one_line(text)
    if cell_len(line) > cells:
        line = set_cell_size(line, cells - 1) + "…"
    return set_cell_size(line, cells) if is_name else " " * (cells - cell_len(line)) + line


def _age(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _fit(line: Text, width: int) -> Text:
    line.truncate(max(1, width), overflow="ellipsis")
    line.no_wrap, line.end = True, ""
    return line
