"""The displays of a batch: what all of them promise, and what each shows where it is meant for."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from orchestrator.batches.displays import Display, Watched
from orchestrator.batches.figures import format_cost, format_count, format_eta, format_rate, format_seconds, format_time
from orchestrator.batches.json_lines import JsonLines
from orchestrator.batches.live_display import LiveDisplay, open_display
from orchestrator.batches.live_screen import build_screen
from orchestrator.batches.log_lines import LogLines
from orchestrator.batches.plain_lines import MAX_TOLD, PlainLines
from orchestrator.batches.progress import Progress
from orchestrator.batches.summary import build_summary, build_summary_lines
from store.batches import BatchEvent, BatchNotice, FailureKind, ItemDone, parse_batch_event
from tests.batch_story import BEGAN, Attempt, failed, tell_batch, tell_item

HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202e\ud800\r\nnext: `rm -rf /`"
DANGEROUS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]")
COMMANDS_OF_RICH = re.compile(r"\x1b\[(\?25[lh]|[0-9;]*[mKA])|\r")
"""What a live display sends on purpose: cursor off and on, colours, clear a line, go up."""


@dataclass
class Stage:
    """A display with its own clock and what it has written."""

    kind: str
    width: int = 100
    height: int = 30
    now: float = 0.0
    progress: Progress = field(default_factory=Progress)
    out: io.StringIO = field(default_factory=io.StringIO)

    def open(self, batch: str = "b-1") -> Display:
        watched = Watched(batch, self.progress, wall=lambda: BEGAN + self.now, ticks=lambda: self.now)
        if self.kind == "json":
            return JsonLines(watched, self.out)
        if self.kind == "plain":
            return PlainLines(watched, self.out)
        if self.kind == "log":
            return LogLines(watched, self.out)
        console = Console(
            file=self.out,
            width=self.width,
            height=self.height,
            force_terminal=True,
            color_system="standard",
            _environ={},
        )
        return LiveDisplay(watched, console)

    def text(self) -> str:
        return COMMANDS_OF_RICH.sub("", self.out.getvalue())


@pytest.fixture(params=["live", "plain", "log", "json"])
def stage(request: pytest.FixtureRequest) -> Stage:
    return Stage(request.param)


def play(stage: Stage, told: list[BatchEvent], every_s: float = 0.05) -> str:
    with stage.open() as display:
        for batch_event in told:
            stage.now += every_s
            display.show(batch_event)
            display.tick()
    return stage.text()


def test_every_display_counts_what_it_is_shown_and_ends_with_a_summary(stage: Stage) -> None:
    shown = play(stage, tell_batch((Attempt(),), (failed(),)))
    assert (stage.progress.snapshot(BEGAN).done, stage.progress.snapshot(BEGAN).failed) == (1, 1)
    assert "toolcrew batch retry b-1 --errors" in shown.rstrip("\n").rpartition("tokens")[2]


def test_every_display_ends_before_anything_has_happened(stage: Stage) -> None:
    assert play(stage, []).endswith("\n")


def test_every_display_ends_cleanly_when_it_is_interrupted_and_says_how_to_go_on(stage: Stage) -> None:
    told = tell_batch((Attempt(),), (Attempt(is_cut=True),))

    def watch() -> None:
        with stage.open() as display:
            for batch_event in told:
                display.show(batch_event)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch()
    assert "toolcrew batch resume b-1" in stage.text()
    assert stage.out.getvalue().count("\x1b[?25l") == stage.out.getvalue().count("\x1b[?25h")


def test_every_display_leaves_a_reader_that_is_gone_alone(stage: Stage) -> None:
    display = stage.open()
    display.__enter__()
    before = len(stage.text())
    display.__exit__(BrokenPipeError, BrokenPipeError(), None)
    assert "succeeded" not in stage.text()[before:]


def test_no_display_is_driven_by_an_attacker_who_chooses_ids_codes_messages_and_tools(stage: Stage) -> None:
    told = [BatchNotice(at=BEGAN, message=HOSTILE, total=3), *tell_item(HOSTILE, failed(code=HOSTILE, message=HOSTILE))]
    told += tell_item(f"{HOSTILE}2", Attempt(is_cut=True, tool=HOSTILE))
    shown = play(stage, told, every_s=1)
    assert not DANGEROUS.search(shown.replace("\n", ""))
    assert not [line for line in shown.splitlines() if line.startswith("next: ")]


def test_no_display_is_driven_by_the_id_of_its_batch(stage: Stage) -> None:
    with stage.open(HOSTILE) as display:
        for batch_event in tell_batch((failed(),), total=2):
            display.show(batch_event)
    assert "toolcrew batch resume" in stage.text()
    assert not DANGEROUS.search(stage.text().replace("\n", ""))


def test_no_display_counts_what_comes_twice(stage: Stage) -> None:
    told = tell_batch((Attempt(),), (failed(),))
    play(stage, [*told, *told[::-1]])
    assert stage.progress.snapshot(BEGAN).calls == 8


# --- on a terminal


def test_a_terminal_is_drawn_at_most_four_times_a_second_and_not_at_all_when_nothing_has_changed() -> None:
    stage = Stage("live")
    drawn = []
    with stage.open() as display:
        for batch_event in tell_batch(*[(Attempt(),)] * 20):
            stage.now += 0.01
            before = len(stage.out.getvalue())
            display.show(batch_event)
            drawn.append(len(stage.out.getvalue()) > before)
        assert sum(drawn) <= 0.01 * len(drawn) / 0.25 + 1
        stage.now += 1
        display.tick()
        before = len(stage.out.getvalue())
        display.tick()
        assert len(stage.out.getvalue()) == before


def test_a_terminal_keeps_the_summary_and_nothing_of_the_display() -> None:
    stage = Stage("live")
    play(stage, tell_batch((Attempt(),)), every_s=1)
    after = stage.out.getvalue().rpartition("\x1b[2K")[2]
    assert "batch b-1: done, 1 of 1 succeeded, 0 failed" in after
    assert "█" not in after


def test_a_terminal_that_changes_its_size_is_drawn_anew() -> None:
    stage = Stage("live")
    watched = Watched("b", stage.progress, wall=lambda: BEGAN, ticks=lambda: stage.now)
    console = Console(file=stage.out, width=100, height=30, force_terminal=True, _environ={})
    with LiveDisplay(watched, console) as display:
        console.size = (40, 10)  # type: ignore[assignment]
        stage.now += 1
        display.tick()
        assert "\x1b[1A" in stage.out.getvalue()


def test_what_a_batch_waits_for_is_read_to_its_end_on_a_narrow_terminal() -> None:
    progress = Progress(1)
    progress.add(
        BatchNotice(
            at=BEGAN,
            message=(
                "the batch waits for its model, and no item fails for it: the model at http://10.1.2.3/v1 answers 503"
            ),
        )
    )
    lines = [line.plain for line in build_screen(progress.snapshot(BEGAN), "b", 40, 20)]
    assert lines[-1].endswith("answers 503")


def test_a_ctrl_c_that_the_terminal_shows_has_room_behind_every_line() -> None:
    stage = Stage("live", width=80)
    assert all(
        cell_len(line) <= 80 - len("^C") - 1
        for line in play(stage, tell_batch((Attempt(is_cut=True),))).split("\n")[:6]
    )


def test_a_log_has_a_line_with_its_time_for_each_begin_end_and_note_and_tells_none_twice() -> None:
    stage = Stage("log")
    told = tell_batch(
        (Attempt(is_retried=True, failure=FailureKind.INFRASTRUCTURE, code="HOST_LOST"), Attempt()), (failed(),)
    )
    lines = play(stage, [*told, *told]).partition("batch b-1:")[0].splitlines()
    assert len(lines) == len(set(lines))
    assert {line.partition("Z  ")[2].partition(";")[0] for line in lines} >= {
        "i-0 begun",
        "i-0 queued again after a failure (infrastructure HOST_LOST)",
        "i-0 begun, attempt 2",
    }
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  ", line) for line in lines)


STORIES = tell_batch(
    *[(Attempt(tool=f"tool_{n}_{'x' * n}"),) for n in range(30)],
    *[(Attempt(is_cut=True, steps=n % 3),) for n in range(30)],
    (failed(),),
    (failed(FailureKind.TOOL),),
)


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 250), height=st.integers(1, 80), word=st.text(max_size=60), count=st.integers(0, len(STORIES))
)
def test_the_screen_fits_every_terminal(width: int, height: int, word: str, count: int) -> None:
    progress = Progress(1000)
    for batch_event in [
        *STORIES[:count],
        *tell_item(word, Attempt(tool=word, is_cut=True)),
        BatchNotice(at=BEGAN, message=word),
    ]:
        progress.add(batch_event)
    lines = build_screen(progress.snapshot(BEGAN + 500), word, width, height)
    assert 1 <= len(lines) <= height
    assert max(cell_len(line.plain) for line in lines) <= width
    assert not any("\n" in line.plain for line in lines)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_screen_shows_the_bar_the_counts_the_rates_the_slowest_and_the_tools(width: int) -> None:
    progress = Progress(100)
    for batch_event in [*STORIES, *tell_item("日本語のとても長い名前のアイテム", Attempt(is_cut=True), at=BEGAN - 60)]:
        progress.add(batch_event)
    lines = [line.plain for line in build_screen(progress.snapshot(BEGAN + 5), "b-1", width, 60)]
    shown = "\n".join(lines)
    for words in (
        "█",
        "30 of 100 done",
        "2 failed",
        "1 infrastructure",
        "1 tool",
        "running",
        "queued",
        "calls/s",
        "tokens",
        "cost",
        "ETA",
        "日本語",
        "p95",
    ):
        assert words in shown


def test_the_bar_is_full_when_all_have_ended_and_not_before() -> None:
    for done, label in ((0, "  0.0 %"), (9999, " 99.9 %"), (10_000, "100.0 %")):
        progress = Progress(10_000)
        for number in range(done):
            progress.add(ItemDone(at=BEGAN, item=str(number)))
        bar = build_screen(progress.snapshot(BEGAN), "b", 50, 10)[1].plain
        assert bar.endswith(label)
        assert ("░" not in bar) == (done == 10_000) or done == 9999


# --- where there is no terminal


def test_lines_come_every_five_seconds_at_most_and_only_when_something_has_changed() -> None:
    stage = Stage("plain")
    with stage.open() as display:
        for _ in range(100):
            stage.now += 0.1
            display.tick()
        assert stage.text().count("queued;") == 1
        for batch_event in tell_item("a", Attempt(steps=50)):
            stage.now += 0.1
            display.show(batch_event)
    assert 3 <= stage.text().count("queued;") <= 5


def test_failures_are_told_one_a_line_and_a_flood_of_them_is_counted() -> None:
    stage = Stage("plain")
    with stage.open() as display:
        for number in range(100):
            display.show(
                ItemDone(
                    at=BEGAN, item=f"i{number}", failure=FailureKind.MODEL, code="cut_reply", message="it broke off"
                )
            )
        assert stage.text().count("failed i") == MAX_TOLD
        assert "failed i0 (model cut_reply): it broke off\n" in stage.text()
        stage.now += 5
        display.show(ItemDone(at=BEGAN, item="later", failure=FailureKind.MODEL))
    assert f"and {100 - MAX_TOLD} more failures in the meantime that are not shown here\n" in stage.text()
    assert "failed later (model )" in stage.text()


def test_failures_that_nobody_was_told_of_are_counted_at_the_end() -> None:
    stage = Stage("plain")
    told: list[BatchEvent] = [ItemDone(at=BEGAN, item=f"i{number}", failure=FailureKind.MODEL) for number in range(7)]
    assert "and 2 more failures" in play(stage, told, every_s=0)


def test_notes_and_repeated_attempts_are_told_once() -> None:
    told = tell_batch((Attempt(is_retried=True, code="HOST_LOST"), Attempt()))
    shown = play(Stage("plain"), [*told, *told])
    assert shown.count("tried again i-0 (infrastructure HOST_LOST)") == 1
    assert shown.count("submitted\n") == 1


# --- for a program


def test_a_program_reads_every_happening_as_it_is_and_then_one_summary() -> None:
    told = tell_batch((Attempt(),), (failed(),))
    *lines, last = play(Stage("json"), [*told, told[0]]).splitlines()
    assert [parse_batch_event(line) for line in lines] == [*told, told[0]]
    summary = json.loads(last)
    assert (summary["type"], summary["batch"], summary["done"], summary["failures"]) == (
        "summary",
        "b-1",
        1,
        {"infrastructure": 1},
    )


# --- which one, and what the end says


def test_the_display_is_chosen_by_where_it_is_shown() -> None:
    watched = Watched("b", Progress())

    def kind(**options: object) -> type[object]:
        return type(open_display(watched, Console(file=io.StringIO(), **options)))  # type: ignore[arg-type]

    assert kind(force_terminal=True, _environ={"TERM": "xterm"}) is LiveDisplay
    assert kind(force_terminal=True, _environ={"TERM": "dumb"}) is PlainLines
    assert kind() is PlainLines
    assert isinstance(open_display(watched, Console(file=io.StringIO()), as_json=True), JsonLines)


def test_the_summary_says_what_to_do_about_each_kind_of_failure() -> None:
    progress = Progress(9)
    for number, kind in enumerate(FailureKind):
        progress.add(ItemDone(at=BEGAN, item=f"i{number}", run=f"run{number}", failure=kind, code="C", message="m"))
    told = build_summary(progress.snapshot(BEGAN), batch="a b")
    commands = re.findall(r"`(.*?)`", " ".join(told.next))
    assert commands == [
        "toolcrew batch resume 'a b'",
        "toolcrew batch resume 'a b'",
        "toolcrew batch retry 'a b' --errors",
        "toolcrew trace show run0",
        "toolcrew batch results 'a b'",
    ]
    assert any("mend these lines" in sentence for sentence in told.next)
    assert "failed 1: model C, as i0: m" in "\n".join(build_summary_lines(told))


def test_a_call_without_a_model_has_a_row_to_look_at_and_no_trace() -> None:
    progress = Progress(1)
    progress.add(ItemDone(at=BEGAN, item="a", run="run0", failure=FailureKind.TOOL, code="C"))
    told = build_summary(progress.snapshot(BEGAN), batch="b", rows=("out.jsonl", "my errors.jsonl"))
    assert told.next == (
        "1 failed for a tool, as they would again: their rows say why",
        "read the rows in 'my errors.jsonl'",
    )


def test_a_batch_that_went_well_has_nothing_to_be_tried_again() -> None:
    progress = Progress(1)
    progress.add(ItemDone(at=BEGAN, item="a", cost=1.5))
    told = build_summary(progress.snapshot(BEGAN), batch="b")
    assert told.next == ("read what there is with `toolcrew batch results b`",)


@pytest.mark.parametrize(
    ("make", "value", "shown"),
    [
        (format_seconds, 0, "0 ms"), (format_seconds, 0.0042, "4.2 ms"), (format_seconds, 0.5, "500 ms"), (format_seconds, 59.99, "59.9 s"),
        (format_seconds, 60, "1 min 00 s"), (format_seconds, 7260, "2 h 01 min"), (format_seconds, 90_000, "1 d 1 h"), (format_seconds, 1e300, "over 30 years"),
        (format_count, 99_999, "99,999"), (format_count, 999_999, "999k"), (format_count, 1_230_000, "1.23M"), (format_count, 10**20, "1e+20"),
        (format_eta, None, "unknown"), (format_eta, 3.2, "4.0 s"), (format_cost, None, "unknown"), (format_cost, 0.01234, "0.0123"),
        (format_rate, 0, "0.0"), (format_rate, 0.012, "0.012"), (format_rate, 1234.5, "1,234"), (format_time, 0, "1970-01-01T00:00:00Z"),
        (format_time, 1e300, "1e+300 s (no date)"),
    ],
)  # fmt: skip
def test_figures_are_short_and_promise_no_more_than_they_know(
    make: Callable[[object], str], value: object, shown: str
) -> None:
    assert make(value) == shown
