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

from tests.support.runs.batch_events import (
    STARTED_AT,
    Attempt,
    build_batch_events,
    build_item_events,
    claimed,
    ended,
    failed_attempt,
    retried,
)
from toolcrew.contract.clock import with_instants
from toolcrew.contract.run_events import BatchNotice, FailureKind, RunEvent
from toolcrew.orchestrator.batches.displays import Display, DisplayedBatch, JsonLines, LogDisplay
from toolcrew.orchestrator.batches.live_progress import LiveProgress, open_display
from toolcrew.orchestrator.batches.progress import MAX_GROUPS, BatchProgress, ProgressSnapshot
from toolcrew.orchestrator.batches.summary import build_summary, build_summary_lines
from toolcrew.orchestrator.terminal.figures import format_cost, format_count, format_rate, format_seconds, format_time

HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202e\ud800\r\nnext: `rm -rf /`"
DANGEROUS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]")
RICH_CONTROL_SEQUENCES = re.compile(r"\x1b\[(\?25[lh]|[0-9;]*[mKA])|\r")
"""Control sequences that a live display sends on purpose: cursor off and on, colours, clear a line, go up."""


@dataclass
class DisplayHarness:
    """A display with its own clock, and the display's output."""

    kind: str
    width: int = 100
    height: int = 30
    now: float = 0.0
    progress: BatchProgress = field(default_factory=BatchProgress)
    out: io.StringIO = field(default_factory=io.StringIO)

    def open(self, batch: str = "b-1") -> Display:
        displayed_batch = DisplayedBatch(
            batch, self.progress, wall=lambda: STARTED_AT + self.now, ticks=lambda: self.now
        )
        if self.kind == "json":
            return JsonLines(displayed_batch, self.out)
        if self.kind == "lines":
            return LogDisplay(displayed_batch, self.out)
        console = Console(
            file=self.out,
            width=self.width,
            height=self.height,
            force_terminal=True,
            color_system="standard",
            _environ={},
        )
        return LiveProgress(displayed_batch, console)

    def text(self) -> str:
        return RICH_CONTROL_SEQUENCES.sub("", self.out.getvalue())


@pytest.fixture(params=["live", "lines", "json"])
def harness(request: pytest.FixtureRequest) -> DisplayHarness:
    return DisplayHarness(request.param)


def show_events(harness: DisplayHarness, events: list[RunEvent], every_s: float = 0.05, batch: str = "b-1") -> str:
    with harness.open(batch) as display:
        for batch_event in events:
            harness.now += every_s
            display.show(batch_event)
            display.tick()
    return harness.text()


def test_every_display_counts_events_and_ends_with_a_summary(harness: DisplayHarness) -> None:
    output = show_events(harness, build_batch_events((Attempt(),), (failed_attempt(),)))
    assert (harness.progress.snapshot(STARTED_AT).done, harness.progress.snapshot(STARTED_AT).failed) == (1, 1)
    assert "toolcrew batches resume b-1 --retry infrastructure" in output.rstrip("\n").rpartition("tokens")[2]


def test_an_interrupted_display_prints_the_resume_command(harness: DisplayHarness) -> None:
    events = build_batch_events((Attempt(),), (Attempt(is_unfinished=True),))

    def watch() -> None:
        with harness.open() as display:
            for batch_event in events:
                display.show(batch_event)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch()
    assert "toolcrew batches resume b-1" in harness.text()
    assert harness.out.getvalue().count("\x1b[?25l") == harness.out.getvalue().count("\x1b[?25h")


def test_hostile_event_texts_print_no_control_characters(harness: DisplayHarness) -> None:
    events = [
        BatchNotice(at=STARTED_AT, message=HOSTILE, total=3),
        *build_item_events(HOSTILE, failed_attempt(code=HOSTILE, message=HOSTILE)),
    ]
    events += build_item_events(f"{HOSTILE}2", Attempt(is_unfinished=True, tool=HOSTILE))
    output = show_events(harness, events, every_s=1)
    assert not DANGEROUS.search(output.replace("\n", ""))
    assert not [line for line in output.splitlines() if line.startswith("next: ")]


def test_a_hostile_batch_id_prints_no_control_characters(harness: DisplayHarness) -> None:
    show_events(harness, build_batch_events((failed_attempt(),), total=2), batch=HOSTILE)
    assert "toolcrew batches resume" in harness.text()
    assert not DANGEROUS.search(harness.text().replace("\n", ""))


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_terminal_shows_progress_counts_rate_cost_and_last_notice(width: int) -> None:
    harness = DisplayHarness("live", width=width)
    events = build_batch_events(
        *[(Attempt(),)] * 30,
        (failed_attempt(),),
        (failed_attempt(FailureKind.TOOL),),
        (Attempt(is_unfinished=True),),
        total=100,
    )
    notice = "the batch waits for its model, and its items do not fail: the model at http://10.1.2.3/v1 answers 503"
    with harness.open() as display:
        for batch_event in [*events, BatchNotice(at=STARTED_AT + 60, message=notice)]:
            display.show(batch_event)
        harness.now += 60
        before = len(harness.out.getvalue())
        display.tick()
        output = RICH_CONTROL_SEQUENCES.sub("", harness.out.getvalue()[before:])
    assert all(cell_len(line) <= width for line in output.splitlines())
    figures = "30 of 100 done, 2 failed (1 tool, 1 infrastructure), 1 running, 67 queued"
    assert figures.replace(" ", "") in re.sub(r"\s", "", output)
    for fragment in ("━", "32/100", "items/s", "ETA", "tokens", "cost", "503"):
        assert fragment in output


@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 250), height=st.integers(2, 80), text=st.text(max_size=60))
def test_the_live_display_fits_any_terminal_size(width: int, height: int, text: str) -> None:
    harness = DisplayHarness("live", width=width, height=height)
    events = [
        *build_item_events(text, Attempt(tool=text, is_unfinished=True)),
        BatchNotice(at=STARTED_AT, message=text),
    ]
    with harness.open(text) as display:
        for batch_event in events:
            display.show(batch_event)
        harness.now += 60
        before = len(harness.out.getvalue())
        display.tick()
        lines = RICH_CONTROL_SEQUENCES.sub("", harness.out.getvalue()[before:]).splitlines()
    assert 1 <= len(lines) <= height
    assert max(cell_len(line) for line in lines) <= width


def test_the_json_display_prints_every_event_and_one_summary() -> None:
    events = build_batch_events((Attempt(),), (failed_attempt(),))
    *lines, last = show_events(DisplayHarness("json"), [*events, events[0]]).splitlines()
    shown = [json.loads(line) for line in lines]
    assert shown == [with_instants(event.to_json()) for event in [*events, events[0]]]
    assert all(line["at"].endswith("Z") for line in shown)
    summary = json.loads(last)
    assert (summary["type"], summary["batch"], summary["done"]) == ("summary", "b-1", 1)
    assert summary["failures"] == {"infrastructure": 1}


def test_the_output_terminal_selects_the_display() -> None:
    displayed_batch = DisplayedBatch("b", BatchProgress())

    def kind(**options: object) -> type[object]:
        return type(open_display(displayed_batch, Console(file=io.StringIO(), **options)))  # type: ignore[arg-type]

    assert kind(force_terminal=True, _environ={"TERM": "xterm"}) is LiveProgress
    assert kind(force_terminal=True, _environ={"TERM": "dumb"}) is LogDisplay
    assert kind() is LogDisplay
    assert isinstance(open_display(displayed_batch, Console(file=io.StringIO()), as_json=True), JsonLines)


def test_the_summary_names_the_next_command_for_each_failure_kind() -> None:
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
    ("make", "value", "output"),
    [
        (format_seconds, 0, "0 ms"), (format_seconds, 0.0042, "4.2 ms"), (format_seconds, 0.5, "500 ms"), (format_seconds, 59.99, "59.9 s"),
        (format_seconds, 60, "1 min 00 s"), (format_seconds, 7260, "2 h 01 min"), (format_seconds, 90_000, "1 d 1 h"), (format_seconds, 1e300, "over 30 years"),
        (format_count, 99_999, "99,999"), (format_count, 999_999, "999k"), (format_count, 1_230_000, "1.23M"), (format_count, 10**20, "1e+20"),
        (format_cost, None, "unknown"), (format_cost, 0.01234, "0.0123"),
        (format_rate, 0, "0.0"), (format_rate, 0.012, "0.012"), (format_rate, 1234.5, "1,234"), (format_time, 0, "1970-01-01T00:00:00Z"),
        (format_time, 1e300, "1e+300 s (no date)"),
    ],
)  # fmt: skip
def test_numbers_and_times_are_formatted_short(make: Callable[[object], str], value: object, output: str) -> None:
    assert make(value) == output


RETRIED_ATTEMPT = Attempt(is_retried=True, code="HOST_LOST")
NOW = STARTED_AT + 1000


def snapshot_of(events: list[RunEvent], now: float = NOW, total: int = 0) -> ProgressSnapshot:
    progress = BatchProgress(total)
    for batch_event in events:
        progress.add(batch_event)
    return progress.snapshot(now)


def without_examples(snapshot: ProgressSnapshot) -> ProgressSnapshot:
    groups = tuple(group.model_copy(update={"item": "", "run": "", "message": ""}) for group in snapshot.groups)
    return snapshot.model_copy(update={"groups": groups})


def test_items_are_counted_by_state() -> None:
    snapshot = snapshot_of(
        build_batch_events(
            (Attempt(),),
            (failed_attempt(),),
            (failed_attempt(FailureKind.MODEL, "cut_reply"),),
            (Attempt(is_unfinished=True),),
            (RETRIED_ATTEMPT,),
            total=9,
        )
    )
    assert (snapshot.done, snapshot.failed, snapshot.running, snapshot.queued, snapshot.total) == (1, 2, 1, 5, 9)
    assert snapshot.failures == {FailureKind.INFRASTRUCTURE: 1, FailureKind.MODEL: 1}
    assert snapshot.retried == 1


def test_items_without_a_cost_are_counted_as_unknown_cost() -> None:
    snapshot = snapshot_of(build_batch_events((Attempt(cost=None),), (Attempt(),)))
    assert (snapshot.cost, snapshot.cost_unknown) == (0.25, 1)


def test_an_item_resumed_by_another_process_is_counted_once() -> None:
    events: list[RunEvent] = [claimed(at=STARTED_AT, item="a"), claimed(at=STARTED_AT + 900, item="a", is_resumed=True)]
    for order in (events, events[::-1], events * 2):
        snapshot = snapshot_of(order, STARTED_AT + 910)
        assert (snapshot.running, snapshot.resumed) == (1, 1)


def test_failure_codes_above_the_limit_share_one_group() -> None:
    events = [
        failed_item
        for number in range(500)
        for failed_item in build_item_events(f"i{number}", failed_attempt(code=f"c{number}", steps=0))
    ]
    snapshot = snapshot_of(events)
    assert (snapshot.failed, sum(group.count for group in snapshot.groups)) == (500, 500)
    assert len(snapshot.groups) == MAX_GROUPS + 1


def test_a_retried_item_is_not_the_example_of_a_failure_group() -> None:
    first, *others = (list(build_item_events(name, failed_attempt())) for name in ("a", "b", "c", "d", "e"))
    messages = [*first, *(batch_event for other in others for batch_event in other)]
    assert snapshot_of(messages).groups[0].item == "a"
    retry = retried(at=NOW, item="a", attempt=2, failure=FailureKind.INFRASTRUCTURE)
    (group,) = snapshot_of([*messages, retry, *build_item_events("f", failed_attempt(), at=NOW)]).groups
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
def test_event_order_and_repetition_do_not_change_the_totals(events: list[RunEvent], shuffle: object) -> None:
    repeated = [*events, *shuffle.choices(events, k=len(events))]  # type: ignore[attr-defined]
    shuffle.shuffle(repeated)  # type: ignore[attr-defined]
    assert without_examples(snapshot_of(repeated)) == without_examples(snapshot_of(events))


@settings(max_examples=60, deadline=None)
@given(events=batches, shuffle=st.randoms(use_true_random=False), total=st.integers(0, 8))
def test_item_counts_add_up_after_every_event(events: list[RunEvent], shuffle: object, total: int) -> None:
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
def test_a_repeated_event_is_not_new(events: list[RunEvent], shuffle: object) -> None:
    shuffle.shuffle(events)  # type: ignore[attr-defined]
    progress = BatchProgress()
    for batch_event in events:
        progress.add(batch_event)
    assert not any(progress.add(batch_event) for batch_event in events)


def test_no_display_prints_a_summary_after_a_broken_pipe(harness: DisplayHarness) -> None:
    display = harness.open()
    display.__enter__()
    before = len(harness.text())
    display.__exit__(BrokenPipeError, BrokenPipeError(), None)
    assert "succeeded" not in harness.text()[before:]


def test_the_log_display_prints_each_failure_retry_and_notice_once() -> None:
    events = build_batch_events(
        (Attempt(is_retried=True, failure=FailureKind.INFRASTRUCTURE, code="HOST_LOST"), Attempt()),
        (failed_attempt(FailureKind.MODEL, "cut_reply", "it broke off"),),
    )
    lines = show_events(DisplayHarness("lines"), [*events, *events]).partition("batch b-1:")[0].splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  ", line) for line in lines)
    assert [line.partition("Z  ")[2] for line in lines if "queued;" not in line] == [
        "submitted",
        "i-0 failed (infrastructure HOST_LOST) and is queued again",
        "i-1 failed (model cut_reply): it broke off",
    ]


def test_the_summary_of_a_failed_call_points_to_its_row() -> None:
    progress = BatchProgress(1)
    progress.add(ended(at=STARTED_AT, item="a", run="run0", failure=FailureKind.TOOL, code="C"))
    text = build_summary(progress.snapshot(STARTED_AT), batch="b", rows=("out.jsonl", "my errors.jsonl"))
    assert text.next == (
        "1 failed because of a tool, and would fail again: read the reasons in their rows",
        "read the rows in 'my errors.jsonl'",
    )
