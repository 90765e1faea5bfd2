"""The circuit breaker in front of the engine: when requests pass and when not. The test controls the breaker's clock."""

from hypothesis import given
from hypothesis import strategies as st

from workers.sandboxd.runtime.engine_gate import Breaker, BreakerDecision


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def open_breaker(clock: Clock) -> Breaker:
    """Return a breaker that has just opened, with a pause of 1 s."""
    breaker = Breaker(clock, threshold=3, first_pause_s=1.0, longest_pause_s=30.0)
    assert [breaker.failed("no answer") for _ in range(3)] == [False, False, True]
    return breaker


def test_a_few_silences_in_a_row_open_it_and_an_answer_between_does_not() -> None:
    breaker = Breaker(Clock(), threshold=3)

    for outcome in ("failed", "failed", "answered", "failed", "failed"):
        breaker.failed("no answer") if outcome == "failed" else breaker.answered()

    assert not breaker.is_open
    assert breaker.failed("no answer") is True
    assert breaker.admit() is BreakerDecision.REFUSE


def test_one_caller_at_a_time_probes() -> None:
    clock = Clock()
    breaker = open_breaker(clock)
    clock.now += 1

    assert [breaker.admit() for _ in range(3)] == [
        BreakerDecision.PROBE,
        BreakerDecision.REFUSE,
        BreakerDecision.REFUSE,
    ]
    breaker.probe_dropped()
    assert breaker.admit() is BreakerDecision.PROBE


MOVES = st.lists(
    st.one_of(
        st.sampled_from(["failed", "answered", "admit", "probe_failed", "probe_answered", "probe_dropped"]),
        st.floats(0.0, 40.0),
    ),
    max_size=80,
)


@given(MOVES)
def test_whatever_happens_it_opens_only_after_silences_and_never_for_longer_than_its_longest_pause(
    moves: list[str | float],
) -> None:
    clock = Clock()
    breaker = Breaker(clock, threshold=3, first_pause_s=1.0, longest_pause_s=30.0)
    is_probing, in_row = False, 0
    for move in moves:
        was_open = breaker.is_open
        if isinstance(move, float):
            clock.now += move
        elif move == "admit":
            admission = breaker.admit()
            assert (admission is BreakerDecision.GO) == (not was_open)
            assert not (admission is BreakerDecision.PROBE and is_probing)
            is_probing = is_probing or admission is BreakerDecision.PROBE
        elif move.startswith("probe_") and is_probing:
            is_probing = False
            if move == "probe_failed":
                breaker.probe_failed("silent")
            else:
                getattr(breaker, move)()
        elif move == "failed":
            in_row += 1
            has_opened = breaker.failed("silent")
            assert has_opened == (breaker.is_open and not was_open)
            assert not (has_opened and in_row < 2)
        elif move == "answered":
            in_row, is_probing = 0, False
            assert breaker.answered() == was_open
            assert breaker.admit() is BreakerDecision.GO
        if not breaker.is_open:
            is_probing = False
        assert 0 <= breaker.next_try_s <= 30.0
        assert breaker.is_open or breaker.next_try_s == 0
    clock.now += 31
    assert breaker.admit() in (
        {BreakerDecision.GO}
        if not breaker.is_open
        else {BreakerDecision.REFUSE}
        if is_probing
        else {BreakerDecision.PROBE}
    )
