"""When a batch will be done: unknown until enough is known, never negative, and no promise that long items break."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.batches.histogram import LogHistogram, bucket_of, middle_of, start_of
from orchestrator.batches.progress import LifeTable, Progress, estimate_arrival
from store.batches import BatchEvent, ItemDone, ItemStarted
from tests.batch_story import BEGAN


def histogram(*seconds: float) -> LogHistogram:
    made = LogHistogram()
    for value in seconds:
        made.add(value)
    return made


def play(lengths: list[float], workers: int) -> tuple[list[BatchEvent], float]:
    """Items worked in their order by so many at once; and when the last ends."""
    free, told = [BEGAN] * workers, list[BatchEvent]()
    for number, length in enumerate(lengths):
        begin = min(free)
        free[free.index(begin)] = begin + length
        told.append(ItemStarted(at=begin, item=str(number)))
        told.append(ItemDone(at=begin + length, item=str(number), seconds=length))
    return sorted(told, key=lambda batch_event: batch_event.at), max(free)


def etas(lengths: list[float], workers: int, *shares: float) -> list[tuple[float | None, float]]:
    """(told, true) at shares of the whole time."""
    told, end = play(lengths, workers)
    found = []
    for share in shares:
        now = BEGAN + (end - BEGAN) * share
        progress = Progress(len(lengths))
        for batch_event in told:
            if batch_event.at <= now:
                progress.add(batch_event)
        found.append((progress.snapshot(now).eta_s, end - now))
    return found


def test_nothing_is_promised_until_some_have_ended() -> None:
    told, _ = play([60.0] * 100, 10)
    progress = Progress(100)
    for batch_event in told[:10]:
        progress.add(batch_event)
    assert progress.snapshot(BEGAN + 30).eta_s is None
    progress.add(ItemDone(at=BEGAN + 30, item="0", seconds=30))
    assert progress.snapshot(BEGAN + 30).eta_s is None


def test_a_batch_that_has_ended_takes_no_longer() -> None:
    assert estimate_arrival(BEGAN, 3, 0, [], histogram(1, 2, 3), []) == 0


def test_items_of_one_length_are_foreseen_well() -> None:
    for told, true in etas([60.0] * 1000, 20, 0.1, 0.3, 0.5, 0.7, 0.9):
        assert told is not None
        assert 0.8 * true < told < 1.35 * true


@pytest.mark.parametrize("seed", range(3))
def test_items_of_very_different_lengths_are_foreseen_within_a_factor(seed: int) -> None:
    dice = random.Random(seed)
    lengths = [dice.lognormvariate(3, 1.3) for _ in range(2000)]
    for told, true in etas(lengths, 32, 0.1, 0.3, 0.5, 0.7):
        assert told is not None
        assert 0.6 * true < told < 2 * true


def test_a_few_long_items_among_quick_ones_are_not_forgotten() -> None:
    """All quick ones have ended, so a rate alone would promise seconds."""
    told, true = etas([600.0] * 4 + [1.0] * 400, 8, 0.5)[0]
    assert told is not None
    assert told > 0.5 * true


def test_silence_makes_it_longer() -> None:
    told, _ = play([1.0] * 100, 10)
    progress = Progress(200)
    for batch_event in told:
        progress.add(batch_event)
    progress.add(ItemStarted(at=BEGAN + 10, item="x"))
    known = [progress.snapshot(BEGAN + 10 + quiet).eta_s for quiet in (0, 60, 120)]
    assert None not in known
    assert known == sorted(known)  # type: ignore[type-var]


def test_nothing_is_promised_when_nobody_works_it() -> None:
    told, _ = play([1.0] * 100, 10)
    progress = Progress(200)
    for batch_event in told:
        progress.add(batch_event)
    assert progress.snapshot(BEGAN + 11).eta_s is not None
    assert progress.snapshot(BEGAN + 100).eta_s is None


def test_a_pause_of_a_night_does_not_count_once_it_goes_on() -> None:
    told, _ = play([1.0] * 100, 10)
    progress = Progress(200)
    for batch_event in told:
        progress.add(batch_event)
    for number in range(10):
        progress.add(ItemStarted(at=BEGAN + 40_000, item=f"x{number}"))
    eta = progress.snapshot(BEGAN + 40_000.5).eta_s
    assert eta is not None
    assert 5 < eta < 30


times = st.floats(0, 1e7)


@given(
    now=st.floats(-1e9, 1e9),
    queued=st.integers(0, 10**6),
    ages=st.lists(times),
    lengths=st.lists(times),
    ends=st.lists(st.floats(-1e9, 1e9)),
)
def test_it_is_never_negative(
    now: float, queued: int, ages: list[float], lengths: list[float], ends: list[float]
) -> None:
    eta = estimate_arrival(now, queued + len(ages) + len(lengths), queued, ages, histogram(*lengths), ends)
    assert eta is None or 0 <= eta < float("inf")


@given(seconds=st.lists(times, min_size=1), share=st.floats(0.01, 1))
def test_a_quantile_is_right_to_five_percent(seconds: list[float], share: float) -> None:
    exact = sorted(seconds)[max(0, -int(-share * len(seconds) // 1) - 1)]
    told = histogram(*seconds).quantile(share)
    assert told <= max(seconds)
    assert abs(told - exact) <= 0.05 * exact + 0.0001


@given(seconds=st.floats(0, 1e12))
def test_a_bucket_holds_what_is_put_into_it(seconds: float) -> None:
    bucket = bucket_of(seconds)
    assert start_of(bucket) <= seconds * (1 + 1e-9)
    assert seconds <= 1e-4 or middle_of(bucket) == pytest.approx(seconds, rel=0.051)


def test_who_has_not_ended_yet_counts_for_how_long_items_take() -> None:
    quick = LifeTable(histogram(*[1.0] * 5), Counter())
    mixed = LifeTable(histogram(*[1.0] * 5), Counter({bucket_of(100.0): 5}))
    assert quick.rest(0.0) < 1.1
    assert mixed.rest(0.0) > 40
