"""The displays of a batch: the guarantees that all displays share, and the output of each display."""

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

from contract.run_events import (
    BatchNotice,
    FailureKind,
    RunEvent,
)
from orchestrator.batches.displays import Display, DisplayedBatch, JsonLines, LogDisplay
from orchestrator.batches.live_progress import LiveProgress, open_display
from orchestrator.batches.progress import MAX_GROUPS, BatchProgress, ProgressSnapshot
from orchestrator.batches.summary import build_summary, build_summary_lines
from orchestrator.terminal.figures import format_cost, format_count, format_rate, format_seconds, format_time
from store.batches import parse_batch_event
from tests.batch_events import (
    STARTED_AT,
    Attempt,
    build_batch_events,
    build_item_events,
    claimed,
    ended,
    failed_attempt,
    retried,
)

HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202e\ud800\r\nnext: `rm -rf /`"
DANGEROUS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]")
COMMANDS_OF_RICH = re.compile(r"\x1b\[(\?25[lh]|[0-9;]*[mKA])|\r")
"""Control sequences that a live display sends on purpose: cursor off and on, colours, clear a line, go up."""


@dataclass
class Stage:
    """A display with its own clock, and the display's output."""

    kind: str
    width: int = 100
    height: int = 30
    now: float = 0.0
    progress: BatchProgress = field(default_factory=BatchProgress)
    out: io.StringIO = field(default_factory=io.StringIO)

    def open(self, batch: str = "b-1") -> Display:
        watched = DisplayedBatch(batch, self.progress, wall=lambda: STARTED_AT + self.now, ticks=lambda: self.now)
        if self.kind == "json":
            return JsonLines(watched, self.out)
        if self.kind == "lines":
            return LogDisplay(watched, self.out)
        console = Console(
            file=self.out,
            width=self.width,
            height=self.height,
            force_terminal=True,
            color_system="standard",
            _environ={},
        )
        return LiveProgress(watched, console)

    def text(self) -> str:
        return COMMANDS_OF_RICH.sub("", self.out.getvalue())


@pytest.fixture(params=["live", "lines", "json"])
def stage(request: pytest.FixtureRequest) -> Stage:
    return Stage(request.param)


def play(stage: Stage, events: list[RunEvent], every_s: float = 0.05) -> str:
    with stage.open() as display:
        for batch_event in events:
            stage.now += every_s
            display.show(batch_event)
            display.tick()
    return stage.text()


def test_every_display_counts_what_it_is_shown_and_ends_with_a_summary(stage: Stage) -> None:
    shown = play(stage, build_batch_events((Attempt(),), (failed_attempt(),)))
    assert (stage.progress.snapshot(STARTED_AT).done, stage.progress.snapshot(STARTED_AT).failed) == (1, 1)
    assert "toolcrew batches resume b-1 --retry infrastructure" in shown.rstrip("\n").rpartition("tokens")[2]


def test_every_display_ends_cleanly_when_it_is_interrupted_and_says_how_to_go_on(stage: Stage) -> None:
    events = build_batch_events((Attempt(),), (Attempt(is_unfinished=True),))

    def watch() -> None:
        with stage.open() as display:
            for batch_event in events:
                display.show(batch_event)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch()
    assert "toolcrew batches resume b-1" in stage.text()
    assert stage.out.getvalue().count("\x1b[?25l") == stage.out.getvalue().count("\x1b[?25h")


def test_no_display_is_driven_by_an_attacker_who_chooses_ids_codes_messages_and_tools(stage: Stage) -> None:
    events = [
        BatchNotice(at=STARTED_AT, message=HOSTILE, total=3),
        *build_item_events(HOSTILE, failed_attempt(code=HOSTILE, message=HOSTILE)),
    ]
    events += build_item_events(f"{HOSTILE}2", Attempt(is_unfinished=True, tool=HOSTILE))
    shown = play(stage, events, every_s=1)
    assert not DANGEROUS.search(shown.replace("\n", ""))
    assert not [line for line in shown.splitlines() if line.startswith("next: ")]


def test_no_display_is_driven_by_the_id_of_its_batch(stage: Stage) -> None:
    with stage.open(HOSTILE) as display:
        for batch_event in build_batch_events((failed_attempt(),), total=2):
            display.show(batch_event)
    assert "toolcrew batches resume" in stage.text()
    assert not DANGEROUS.search(stage.text().replace("\n", ""))


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_terminal_shows_the_bar_the_counts_the_rate_the_cost_and_the_last_notice(width: int) -> None:
    stage = Stage("live", width=width)
    events = build_batch_events(
        *[(Attempt(),)] * 30,
        (failed_attempt(),),
        (failed_attempt(FailureKind.TOOL),),
        (Attempt(is_unfinished=True),),
        total=100,
    )
    notice = "the batch waits for its model, and its items do not fail: the model at http://10.1.2.3/v1 answers 503"
    with stage.open() as display:
        for batch_event in [*events, BatchNotice(at=STARTED_AT + 60, message=notice)]:
            display.show(batch_event)
        stage.now += 60
        before = len(stage.out.getvalue())
        display.tick()
        shown = COMMANDS_OF_RICH.sub("", stage.out.getvalue()[before:])
    assert all(cell_len(line) <= width for line in shown.splitlines())
    figures = "30 of 100 done, 2 failed (1 tool, 1 infrastructure), 1 running, 67 queued"
    assert figures.replace(" ", "") in re.sub(r"\s", "", shown)
    for fragment in ("━", "32/100", "items/s", "ETA", "tokens", "cost", "503"):
        assert fragment in shown


@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 250), height=st.integers(2, 80), word=st.text(max_size=60))
def test_the_display_fits_every_terminal(width: int, height: int, word: str) -> None:
    stage = Stage("live", width=width, height=height)
    events = [
        *build_item_events(word, Attempt(tool=word, is_unfinished=True)),
        BatchNotice(at=STARTED_AT, message=word),
    ]
    with stage.open(word) as display:
        for batch_event in events:
            display.show(batch_event)
        stage.now += 60
        before = len(stage.out.getvalue())
        display.tick()
        lines = COMMANDS_OF_RICH.sub("", stage.out.getvalue()[before:]).splitlines()
    assert 1 <= len(lines) <= height
    assert max(cell_len(line) for line in lines) <= width


# --- for a program


def test_a_program_reads_every_happening_as_it_is_and_then_one_summary() -> None:
    events = build_batch_events((Attempt(),), (failed_attempt(),))
    *lines, last = play(Stage("json"), [*events, events[0]]).splitlines()
    assert [parse_batch_event(line) for line in lines] == [*events, events[0]]
    summary = json.loads(last)
    assert (summary["type"], summary["batch"], summary["done"]) == ("summary", "b-1", 1)
    assert summary["failures"] == {"infrastructure": 1}


def test_the_display_is_chosen_by_where_it_is_shown() -> None:
    watched = DisplayedBatch("b", BatchProgress())

    def kind(**options: object) -> type[object]:
        return type(open_display(watched, Console(file=io.StringIO(), **options)))  # type: ignore[arg-type]

    assert kind(force_terminal=True, _environ={"TERM": "xterm"}) is LiveProgress
    assert kind(force_terminal=True, _environ={"TERM": "dumb"}) is LogDisplay
    assert kind() is LogDisplay
    assert isinstance(open_display(watched, Console(file=io.StringIO()), as_json=True), JsonLines)


def test_the_summary_says_what_to_do_about_each_kind_of_failure() -> None:
    progress = BatchProgress(9)
    for number, kind in enumerate(FailureKind):
        progress.add(ended(at=STARTED_AT, item=f"i{number}", run=f"run{number}", failure=kind, code="C", message="m"))
    text = build_summary(progress.snapshot(STARTED_AT), batch="a b")
    commands = re.findall(r"`(.*?)`", " ".join(text.next))
    assert commands == [
        "toolcrew batches resume 'a b'",
        "toolcrew batches resume 'a b'",
        "toolcrew batches resume 'a b' --retry infrastructure",
        "toolcrew traces show run0",
        "toolcrew batches export 'a b'",
    ]
    assert any("fix these lines" in sentence for sentence in text.next)
    assert "failed 1: model C, as i0: m" in "\n".join(build_summary_lines(text))


@pytest.mark.parametrize(
    ("make", "value", "shown"),
    [
        (format_seconds, 0, "0 ms"), (format_seconds, 0.0042, "4.2 ms"), (format_seconds, 0.5, "500 ms"), (format_seconds, 59.99, "59.9 s"),
        (format_seconds, 60, "1 min 00 s"), (format_seconds, 7260, "2 h 01 min"), (format_seconds, 90_000, "1 d 1 h"), (format_seconds, 1e300, "over 30 years"),
        (format_count, 99_999, "99,999"), (format_count, 999_999, "999k"), (format_count, 1_230_000, "1.23M"), (format_count, 10**20, "1e+20"),
        (format_cost, None, "unknown"), (format_cost, 0.01234, "0.0123"),
        (format_rate, 0, "0.0"), (format_rate, 0.012, "0.012"), (format_rate, 1234.5, "1,234"), (format_time, 0, "1970-01-01T00:00:00Z"),
        (format_time, 1e300, "1e+300 s (no date)"),
    ],
)  # fmt: skip
def test_figures_are_short(make: Callable[[object], str], value: object, shown: str) -> None:
    assert make(value) == shown


RETRIED = Attempt(is_retried=True, code="HOST_LOST")
NOW = STARTED_AT + 1000


def stand(events: list[RunEvent], now: float = NOW, total: int = 0) -> ProgressSnapshot:
    progress = BatchProgress(total)
    for batch_event in events:
        progress.add(batch_event)
    return progress.snapshot(now)


def without_examples(snapshot: ProgressSnapshot) -> ProgressSnapshot:
    groups = tuple(group.model_copy(update={"item": "", "run": "", "message": ""}) for group in snapshot.groups)
    return snapshot.model_copy(update={"groups": groups})


def test_items_are_counted_where_they_stand() -> None:
    snapshot = stand(
        build_batch_events(
            (Attempt(),),
            (failed_attempt(),),
            (failed_attempt(FailureKind.MODEL, "cut_reply"),),
            (Attempt(is_unfinished=True),),
            (RETRIED,),
            total=9,
        )
    )
    assert (snapshot.done, snapshot.failed, snapshot.running, snapshot.queued, snapshot.total) == (1, 2, 1, 5, 9)
    assert snapshot.failures == {FailureKind.INFRASTRUCTURE: 1, FailureKind.MODEL: 1}
    assert snapshot.retried == 1


def test_a_cost_that_some_items_do_not_report_is_known_to_be_too_small() -> None:
    snapshot = stand(build_batch_events((Attempt(cost=None),), (Attempt(),)))
    assert (snapshot.cost, snapshot.cost_unknown) == (0.25, 1)


def test_an_item_that_another_process_continues_is_counted_once() -> None:
    events: list[RunEvent] = [claimed(at=STARTED_AT, item="a"), claimed(at=STARTED_AT + 900, item="a", is_resumed=True)]
    for order in (events, events[::-1], events * 2):
        snapshot = stand(order, STARTED_AT + 910)
        assert (snapshot.running, snapshot.resumed) == (1, 1)


def test_codes_without_end_are_counted_and_reported_together() -> None:
    events = [
        failed_item
        for number in range(500)
        for failed_item in build_item_events(f"i{number}", failed_attempt(code=f"c{number}", steps=0))
    ]
    snapshot = stand(events)
    assert (snapshot.failed, sum(group.count for group in snapshot.groups)) == (500, 500)
    assert len(snapshot.groups) == MAX_GROUPS + 1


def test_an_example_is_never_an_item_that_has_been_tried_again() -> None:
    first, *others = (list(build_item_events(name, failed_attempt())) for name in ("a", "b", "c", "d", "e"))
    messages = [*first, *(batch_event for other in others for batch_event in other)]
    assert stand(messages).groups[0].item == "a"
    retry = retried(at=NOW, item="a", attempt=2, failure=FailureKind.INFRASTRUCTURE)
    (group,) = stand([*messages, retry, *build_item_events("f", failed_attempt(), at=NOW)]).groups
    assert (group.item, group.count) == ("f", 5)


attempts = st.builds(
    Attempt,
    steps=st.integers(0, 3),
    calls_a_step=st.integers(0, 3),
    failure=st.sampled_from([None, *FailureKind]),
    code=st.sampled_from(["", "HOST_LOST", "max_wall"]),
    cost=st.sampled_from([None, 0.1, 0.2, 0.7]),
    is_retried=st.booleans(),
    is_unfinished=st.booleans(),
    is_resumed=st.booleans(),
    step_s=st.floats(0, 100),
    waited_s=st.floats(0, 100),
)
batches = st.lists(st.lists(attempts, min_size=1, max_size=3).map(tuple), max_size=5).map(
    lambda items: build_batch_events(*items)
)


@settings(max_examples=80, deadline=None)
@given(events=batches, shuffle=st.randoms(use_true_random=False))
def test_any_order_and_any_repetition_give_the_same_totals(events: list[RunEvent], shuffle: object) -> None:
    again = [*events, *shuffle.choices(events, k=len(events))]  # type: ignore[attr-defined]
    shuffle.shuffle(again)  # type: ignore[attr-defined]
    assert without_examples(stand(again)) == without_examples(stand(events))


@settings(max_examples=60, deadline=None)
@given(events=batches, shuffle=st.randoms(use_true_random=False), total=st.integers(0, 8))
def test_every_item_stands_somewhere_at_every_moment(events: list[RunEvent], shuffle: object, total: int) -> None:
    shuffle.shuffle(events)  # type: ignore[attr-defined]
    progress = BatchProgress(total)
    for batch_event in events:
        progress.add(batch_event)
        snapshot = progress.snapshot(batch_event.at)
        assert snapshot.done + snapshot.failed + snapshot.running + snapshot.queued == snapshot.total
        assert min(snapshot.done, snapshot.failed, snapshot.running, snapshot.queued) >= 0
        assert snapshot.failed == sum(snapshot.failures.values()) == sum(group.count for group in snapshot.groups)


@settings(max_examples=60, deadline=None)
@given(events=batches, shuffle=st.randoms(use_true_random=False))
def test_what_is_reported_again_is_not_new(events: list[RunEvent], shuffle: object) -> None:
    shuffle.shuffle(events)  # type: ignore[attr-defined]
    progress = BatchProgress()
    for batch_event in events:
        progress.add(batch_event)
    assert not any(progress.add(batch_event) for batch_event in events)


def test_every_display_leaves_a_reader_that_is_gone_alone(stage: Stage) -> None:
    display = stage.open()
    display.__enter__()
    before = len(stage.text())
    display.__exit__(BrokenPipeError, BrokenPipeError(), None)
    assert "succeeded" not in stage.text()[before:]


def test_failures_retries_and_notices_have_a_line_each_with_its_time_and_none_comes_twice() -> None:
    events = build_batch_events(
        (Attempt(is_retried=True, failure=FailureKind.INFRASTRUCTURE, code="HOST_LOST"), Attempt()),
        (failed_attempt(FailureKind.MODEL, "cut_reply", "it broke off"),),
    )
    lines = play(Stage("lines"), [*events, *events]).partition("batch b-1:")[0].splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  ", line) for line in lines)
    assert [line.partition("Z  ")[2] for line in lines if "queued;" not in line] == [
        "submitted",
        "i-0 failed (infrastructure HOST_LOST) and is queued again",
        "i-1 failed (model cut_reply): it broke off",
    ]


def test_a_call_without_a_model_has_a_row_to_look_at_and_no_trace() -> None:
    progress = BatchProgress(1)
    progress.add(ended(at=STARTED_AT, item="a", run="run0", failure=FailureKind.TOOL, code="C"))
    text = build_summary(progress.snapshot(STARTED_AT), batch="b", rows=("out.jsonl", "my errors.jsonl"))
    assert text.next == (
        "1 failed because of a tool, and would fail again: read the reasons in their rows",
        "read the rows in 'my errors.jsonl'",
    )
