"""Progress of a batch: the same set of batch_events gives the same totals in any order of arrival, and every item has
a state.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from contract.run_events import (
    BatchNotice,
    FailureKind,
    RunEvent,
)
from orchestrator.batches.progress import MAX_GROUPS, MAX_NOTES, BatchProgress, ProgressSnapshot, Stage
from tests.batch_story import (
    BEGAN,
    Attempt,
    claimed,
    ended,
    failed,
    retried,
    tell_batch,
    tell_item,
)

RETRIED = Attempt(is_retried=True, code="HOST_LOST")
NOW = BEGAN + 1000


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


def test_the_end_of_an_item_counts_for_missed_events() -> None:
    snapshot = stand([ended(at=BEGAN, item="a", steps=3, calls=4, tokens=(50, 5))])
    assert (snapshot.steps, snapshot.calls, snapshot.prompt_tokens, snapshot.cost) == (3, 4, 50, None)


def test_a_cost_that_some_items_do_not_report_is_known_to_be_too_small() -> None:
    snapshot = stand(tell_batch((Attempt(cost=None),), (Attempt(),)))
    assert (snapshot.cost, snapshot.cost_unknown) == (0.25, 1)


def test_an_item_that_another_process_continues_is_counted_once() -> None:
    events: list[RunEvent] = [claimed(at=BEGAN, item="a"), claimed(at=BEGAN + 900, item="a", is_resumed=True)]
    for order in (events, events[::-1], events * 2):
        snapshot = stand(order, BEGAN + 910)
        assert (snapshot.running, snapshot.resumed) == (1, 1)


def test_the_latest_attempt_is_known_with_its_stage() -> None:
    progress = BatchProgress()
    for batch_event in tell_batch((failed(), Attempt(is_cut=True)), (Attempt(),)):
        progress.add(batch_event)
    assert [progress.latest(name) for name in ("i-0", "i-1", "x")] == [
        (2, Stage.RUNNING),
        (1, Stage.ENDED),
        (0, Stage.QUEUED),
    ]


def test_codes_without_end_are_counted_and_reported_together() -> None:
    events = [
        failed_item
        for number in range(500)
        for failed_item in tell_item(f"i{number}", failed(code=f"c{number}", steps=0))
    ]
    snapshot = stand(events)
    assert (snapshot.failed, sum(group.count for group in snapshot.groups)) == (500, 500)
    assert len(snapshot.groups) == MAX_GROUPS + 1


def test_an_example_is_never_an_item_that_has_been_tried_again() -> None:
    first, *others = (list(tell_item(name, failed())) for name in ("a", "b", "c", "d", "e"))
    messages = [*first, *(batch_event for other in others for batch_event in other)]
    assert stand(messages).groups[0].item == "a"
    retry = retried(at=NOW, item="a", attempt=2, failure=FailureKind.INFRASTRUCTURE)
    (group,) = stand([*messages, retry, *tell_item("f", failed(), at=NOW)]).groups
    assert (group.item, group.count) == ("f", 5)


def test_notes_are_reported_once_and_the_newest_are_kept() -> None:
    progress = BatchProgress()
    notes = [BatchNotice(at=BEGAN + number, message=f"note {number}") for number in range(50)]
    assert [progress.add(note) for note in notes] == [True] * 50
    assert not progress.add(notes[-1])
    assert [note.message for note in progress.snapshot(NOW).notes] == [
        f"note {number}" for number in range(50 - MAX_NOTES, 50)
    ]


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
