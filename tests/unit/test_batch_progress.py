"""Progress of a batch: the same set of batch_events gives the same totals, however it arrives, and every item stands
somewhere.
"""

import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.batches.progress import MAX_NOTES, MAX_TOOLS, Progress
from orchestrator.batches.snapshot import Snapshot
from store.batches import BatchEvent, BatchNotice, CallDone, FailureKind, ItemDone, ItemRetried, ItemStarted, StepDone
from tests.batch_story import BEGAN, Attempt, failed, tell_batch, tell_item

RETRIED = Attempt(is_retried=True, code="HOST_LOST")
NOW = BEGAN + 1000


def stand(told: list[BatchEvent], now: float = NOW, total: int = 0) -> Snapshot:
    progress = Progress(total)
    for batch_event in told:
        progress.add(batch_event)
    return progress.snapshot(now)


def without_examples(snapshot: Snapshot) -> Snapshot:
    groups = tuple(group.model_copy(update={"item": "", "run": "", "message": ""}) for group in snapshot.groups)
    return snapshot.model_copy(update={"groups": groups})


def test_items_are_counted_where_they_stand() -> None:
    snapshot = stand(
        tell_batch(
            (Attempt(),),
            (failed(),),
            (failed(FailureKind.MODEL, "cut_reply"),),
            (Attempt(is_cut=True),),
            (RETRIED,),
            total=9,
        )
    )
    assert (snapshot.done, snapshot.failed, snapshot.running, snapshot.queued, snapshot.total) == (1, 2, 1, 5, 9)
    assert snapshot.failures == {FailureKind.INFRASTRUCTURE: 1, FailureKind.MODEL: 1}
    assert snapshot.retried == 1


def test_an_item_that_is_tried_again_and_succeeds_is_no_failure() -> None:
    snapshot = stand(tell_batch((failed(), Attempt()), (RETRIED, Attempt())))
    assert (snapshot.done, snapshot.failed, snapshot.groups, snapshot.retried) == (2, 0, (), 2)


def test_what_failed_attempts_spent_is_counted() -> None:
    snapshot = stand(tell_batch((failed(), Attempt()), (RETRIED, Attempt())))
    assert (snapshot.steps, snapshot.calls, snapshot.prompt_tokens, snapshot.completion_tokens) == (8, 16, 800, 80)
    assert snapshot.cost == 0.75


def test_tokens_of_items_that_run_are_counted_as_they_come() -> None:
    assert stand(list(tell_item("a", Attempt(steps=5, is_cut=True)))).prompt_tokens == 500


def test_the_end_of_an_item_counts_for_what_nobody_heard() -> None:
    snapshot = stand([ItemDone(at=BEGAN, item="a", steps=3, calls=4, prompt_tokens=50, completion_tokens=5)])
    assert (snapshot.steps, snapshot.calls, snapshot.prompt_tokens, snapshot.cost) == (3, 4, 50, None)


def test_a_cost_that_some_items_do_not_tell_is_known_to_be_too_small() -> None:
    snapshot = stand(tell_batch((Attempt(cost=None),), (Attempt(),)))
    assert (snapshot.cost, snapshot.cost_unknown) == (0.25, 1)


def test_items_are_in_the_count_before_the_total_is_told() -> None:
    snapshot = stand(list(tell_item("a", Attempt(is_cut=True))))
    assert (snapshot.total, snapshot.running, snapshot.eta_s, snapshot.has_ended) == (1, 1, None, False)


def test_a_resumed_item_has_the_age_that_it_has_since_somebody_works_it() -> None:
    told: list[BatchEvent] = [ItemStarted(at=BEGAN, item="a"), ItemStarted(at=BEGAN + 900, item="a", is_resumed=True)]
    for order in (told, told[::-1]):
        snapshot = stand(order, BEGAN + 910)
        assert (snapshot.slowest_running[0].age_s, snapshot.resumed) == (10, 1)


def test_ends_without_a_time_count_and_say_nothing_of_how_long_items_take() -> None:
    told = [ItemDone(at=BEGAN + 100, item=f"i{number}", run="r", steps=3) for number in range(40)]
    worked = [
        ItemStarted(at=BEGAN, item="w", run="r"),
        ItemDone(at=BEGAN + 60, item="w", run="r", seconds=60.0, steps=3),
    ]
    snapshot = stand(
        [BatchNotice(at=BEGAN, message="m", total=100), *told, *worked, ItemStarted(at=BEGAN + 60, item="v", run="r")],
        BEGAN + 101,
    )
    assert (snapshot.done, snapshot.steps, [one.item for one in snapshot.slowest], snapshot.eta_s) == (
        41,
        123,
        ["w"],
        None,
    )


def test_which_ends_have_been_heard_of_is_known_by_attempt() -> None:
    progress = Progress()
    for batch_event in tell_batch(
        (Attempt(),),
        (Attempt(is_retried=True, failure=FailureKind.TOOL), Attempt(is_cut=True)),
        (Attempt(is_cut=True),),
    ):
        progress.add(batch_event)
    known = [
        batch_event.item
        for batch_event in tell_batch((Attempt(),), (Attempt(),), (Attempt(),))
        if isinstance(batch_event, ItemDone)
    ]
    assert [(progress.has_end(name, 1), progress.has_end(name, 2)) for name in known] == [
        (True, False),
        (True, False),
        (False, False),
    ]
    assert not progress.has_end("nobody", 1)


def test_the_items_that_run_longest_say_what_they_do() -> None:
    slow, fresh = list(tell_item("slow", Attempt(steps=3, is_cut=True))), [ItemStarted(at=BEGAN + 4, item="fresh")]
    rows = stand([*slow, *fresh], BEGAN + 5).slowest_running
    assert [(row.item, row.age_s, row.does) for row in rows] == [
        ("slow", 4.5, "3 steps, last bash_tool"),
        ("fresh", 1, "setting up"),
    ]


def test_a_clock_that_is_ahead_makes_no_age_and_no_time_negative() -> None:
    snapshot = stand([ItemStarted(at=BEGAN + 60, item="a", waited_s=-3)], BEGAN)
    assert (snapshot.slowest_running[0].age_s, snapshot.wall_s, snapshot.waits.max_s) == (0, 0, 0)


def test_calls_a_second_are_those_of_the_last_ten_seconds() -> None:
    calls: list[BatchEvent] = [
        CallDone(at=BEGAN + number / 2, item="a", call=str(number), tool="t", seconds=0.1) for number in range(200)
    ]
    for order in (calls, calls[::-1]):
        assert stand(order, BEGAN + 99.5).calls_per_s == 2
        assert stand(order, BEGAN + 200).calls_per_s == 0
        assert stand(order, BEGAN + 200).calls_per_s_overall == 1


def test_times_of_a_tool_are_told_with_its_errors_and_waits() -> None:
    told = tell_batch((Attempt(steps=4),), (Attempt(tool="read_tool"),))
    bash, read = stand(told).tools
    assert (bash.tool, bash.calls, bash.errors, read.tool, read.calls) == ("bash_tool", 8, 1, "read_tool", 4)
    assert bash.seconds.max_s == 0.8
    assert abs(bash.seconds.p50_s - 0.4) < 0.02
    assert abs(bash.queued.p95_s - 0.04) < 0.002


def test_tools_that_a_model_makes_up_cost_no_more_than_a_table() -> None:
    calls: list[BatchEvent] = [
        CallDone(at=BEGAN, item="a", call=str(n), tool=f"t{n}" * 99, seconds=0.1) for n in range(1000)
    ]
    tools = stand(calls).tools
    assert (len(tools), sum(tool.calls for tool in tools)) == (MAX_TOOLS + 1, 1000)
    assert max(len(tool.tool) for tool in tools) == 128


def test_codes_without_end_are_counted_and_told_together() -> None:
    told = [
        failed_item
        for number in range(500)
        for failed_item in tell_item(f"i{number}", failed(code=f"c{number}", steps=0))
    ]
    snapshot = stand(told)
    assert (snapshot.failed, sum(group.count for group in snapshot.groups)) == (500, 500)
    assert len(snapshot.groups) < 250


def test_an_example_is_never_an_item_that_has_been_tried_again() -> None:
    first, *others = (list(tell_item(name, failed())) for name in ("a", "b", "c", "d", "e"))
    told = [*first, *(batch_event for other in others for batch_event in other)]
    assert stand(told).groups[0].item == "a"
    assert (
        stand([*told, ItemRetried(at=NOW, item="a", attempt=2, failure=FailureKind.INFRASTRUCTURE)]).groups[0].item
        == "b"
    )


def test_notes_are_told_once_and_the_newest_are_kept() -> None:
    progress = Progress()
    notes = [BatchNotice(at=BEGAN + number, message=f"note {number}") for number in range(50)]
    assert [progress.add(note) for note in notes] == [True] * 50
    assert not progress.add(notes[-1])
    assert [note.message for note in progress.snapshot(NOW).notes] == [
        f"note {number}" for number in range(50 - MAX_NOTES, 50)
    ]


def test_a_late_word_of_an_earlier_attempt_moves_nothing() -> None:
    told: list[BatchEvent] = [
        ItemDone(at=BEGAN, item="a", attempt=2),
        ItemDone(at=BEGAN + 9, item="a", failure=FailureKind.MODEL),
    ]
    assert (stand(told).done, stand(told).failed) == (1, 0)


attempts = st.builds(
    Attempt,
    steps=st.integers(0, 3),
    calls_a_step=st.integers(0, 3),
    failure=st.sampled_from([None, *FailureKind]),
    code=st.sampled_from(["", "HOST_LOST", "max_wall"]),
    cost=st.sampled_from([None, 0.1, 0.2, 0.7]),
    is_retried=st.booleans(),
    is_cut=st.booleans(),
    is_resumed=st.booleans(),
    step_s=st.floats(0, 100),
    waited_s=st.floats(0, 100),
)
batches = st.lists(st.lists(attempts, min_size=1, max_size=3).map(tuple), max_size=5).map(
    lambda items: tell_batch(*items)
)


@settings(max_examples=80, deadline=None)
@given(told=batches, shuffle=st.randoms(use_true_random=False))
def test_any_order_and_any_repetition_give_the_same_totals(told: list[BatchEvent], shuffle: object) -> None:
    again = [*told, *shuffle.choices(told, k=len(told))]  # type: ignore[attr-defined]
    shuffle.shuffle(again)  # type: ignore[attr-defined]
    assert without_examples(stand(again)) == without_examples(stand(told))


@settings(max_examples=60, deadline=None)
@given(told=batches, shuffle=st.randoms(use_true_random=False), total=st.integers(0, 8))
def test_every_item_stands_somewhere_at_every_moment(told: list[BatchEvent], shuffle: object, total: int) -> None:
    shuffle.shuffle(told)  # type: ignore[attr-defined]
    progress = Progress(total)
    for batch_event in told:
        progress.add(batch_event)
        snapshot = progress.snapshot(batch_event.at)
        assert snapshot.done + snapshot.failed + snapshot.running + snapshot.queued == snapshot.total
        assert min(snapshot.done, snapshot.failed, snapshot.running, snapshot.queued) >= 0
        assert snapshot.failed == sum(snapshot.failures.values()) == sum(group.count for group in snapshot.groups)
        assert snapshot.eta_s is None or snapshot.eta_s >= 0


@settings(max_examples=60, deadline=None)
@given(told=batches, shuffle=st.randoms(use_true_random=False))
def test_what_is_told_again_is_not_new(told: list[BatchEvent], shuffle: object) -> None:
    shuffle.shuffle(told)  # type: ignore[attr-defined]
    progress = Progress()
    for batch_event in told:
        progress.add(batch_event)
    assert not any(progress.add(batch_event) for batch_event in told)


def test_a_long_item_has_each_of_its_many_calls_counted_once() -> None:
    calls: list[BatchEvent] = [CallDone(at=BEGAN, item="a", call=str(n), tool="t", seconds=0.1) for n in range(3000)]
    steps: list[BatchEvent] = [StepDone(at=BEGAN, item="a", step=n) for n in range(3000)]
    snapshot = stand([*calls, *steps, *calls[::-1], *steps])
    assert (snapshot.calls, snapshot.steps, snapshot.tools[0].calls) == (3000, 3000, 3000)


def test_items_that_have_ended_cost_nearly_no_memory() -> None:
    """50,000 of them, with 20 calls each, cost 2 MB; a small part is enough to see it."""
    told = [list(tell_item(f"item-{number:032}", Attempt(steps=2, calls_a_step=2))) for number in range(1000)]
    progress = Progress(1000)
    tracemalloc.start()
    for batch_events in told:
        for batch_event in batch_events:
            progress.add(batch_event)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert progress.snapshot(NOW).done == 1000
    assert used < 200_000
