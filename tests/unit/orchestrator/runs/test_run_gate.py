"""The gate: a failure that is not the run's fault delays the run at no cost. A failure of the run itself ends the run
in time.
"""

import pytest

from toolcrew.contract.errors import (
    ConfigError,
    ErrorCode,
    ModelDenied,
    ModelInterrupted,
    ModelRefused,
    ModelUnavailable,
    ToolFailure,
)
from toolcrew.orchestrator.runs.run_gate import (
    MAX_DEFERRALS,
    MAX_LONE_DEFERRALS,
    PAUSES_S,
    QUOTA_RETRY_S,
    EndpointDown,
    GatedRun,
    RunDeferred,
    RunGate,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gate(clock: Clock) -> RunGate:
    return RunGate(clock)


def fail(
    gate: RunGate, run: str = "a", error: ModelUnavailable | None = None, answered: str | None = None
) -> ModelUnavailable:
    """Fail a request with this error. With `answered`, another run's request succeeds first. Return the exception
    that the run gets.
    """

    def ask() -> None:
        with gate.request(run):
            if answered is not None:
                gate.record_answer(answered)
            raise error or ModelUnavailable("down")

    with pytest.raises(ModelUnavailable) as caught:
        ask()
    return caught.value


def test_unreachable_model_stops_claims_until_it_replies(gate: RunGate, clock: Clock) -> None:
    assert gate.admit(16, 0) == 16
    assert isinstance(fail(gate), EndpointDown)
    assert gate.admit(16, 0) == 0
    for pause_s in (*PAUSES_S, PAUSES_S[-1]):
        clock.now += pause_s - 0.1
        assert gate.admit(16, 0) == 0
        clock.now += 0.2
        assert [gate.admit(0, 16), gate.admit(16, 0), gate.admit(16, 0)] == [0, 1, 0]
    assert gate.down_s == pytest.approx(sum(PAUSES_S) + PAUSES_S[-1] + 0.1 * (len(PAUSES_S) + 1))
    gate.record_answer("a")
    assert (gate.down_s, gate.admit(16, 3)) == (None, 16)


def test_request_that_fails_while_others_succeed_is_a_lone_failure(gate: RunGate) -> None:
    error = fail(gate, answered="b")
    assert isinstance(error, EndpointDown)
    assert (error.is_lone, gate.down_s) == (True, None)


def test_deferrals_of_a_run_are_limited(gate: RunGate) -> None:
    errors = [fail(gate) for _ in range(MAX_DEFERRALS + 1)]
    assert [isinstance(error, EndpointDown) for error in errors] == [True] * MAX_DEFERRALS + [False]
    assert isinstance(fail(gate), EndpointDown)
    lone_errors = [fail(gate, "poison", answered="b") for _ in range(MAX_LONE_DEFERRALS + 1)]
    assert [isinstance(error, EndpointDown) for error in lone_errors] == [True] * MAX_LONE_DEFERRALS + [False]


def test_successful_reply_resets_the_deferral_count(gate: RunGate, clock: Clock) -> None:
    for _ in range(3 * MAX_DEFERRALS):
        assert isinstance(fail(gate), EndpointDown)
        gate.record_answer("b")
        clock.now += 1
    for _ in range(3 * MAX_LONE_DEFERRALS):
        assert isinstance(fail(gate, answered="b"), EndpointDown)
        gate.record_answer("a")


@pytest.mark.parametrize("error", [ModelRefused("400"), ModelInterrupted("cut"), ModelDenied("401")])
def test_permanent_failure_is_not_deferred(gate: RunGate, error: ModelUnavailable) -> None:
    assert fail(gate, error=error) is error
    assert gate.down_s is None


def test_first_chunk_marks_the_model_as_reachable(gate: RunGate) -> None:
    run = GatedRun(gate, "a")
    with pytest.raises(EndpointDown), run.request():
        raise ModelUnavailable("down")
    with pytest.raises(ModelUnavailable, match="had not begun to answer"):
        run.check_answered()
    with run.request():
        run.record_answer()
    assert gate.down_s is None
    run.check_answered()


def test_after_a_quota_error_runs_are_admitted_one_at_a_time(gate: RunGate, clock: Clock) -> None:
    gate.record_quota_limit(4)
    assert [gate.admit(12, 4), gate.admit(13, 3)] == [0, 1]
    clock.now += QUOTA_RETRY_S
    assert [gate.admit(12, 4), gate.admit(11, 5)] == [1, 0]
    gate.record_quota_limit(0)
    assert gate.admit(16, 0) == 0
    for _ in range(16):
        clock.now += QUOTA_RETRY_S
        gate.admit(16, 0)
    assert gate.admit(100, 0) == 100


def test_error_is_classified_by_its_cause(gate: RunGate) -> None:
    events = [
        gate.classify(EndpointDown("down", is_lone=False), None),
        gate.classify(EndpointDown("500", is_lone=True), None),
        gate.classify(ToolFailure(ErrorCode.QUOTA_EXCEEDED, "full"), None),
        gate.classify(ToolFailure(ErrorCode.RATE_LIMITED, "slower"), None),
    ]
    assert [reason.cause if isinstance(reason, RunDeferred) else reason for reason in events] == [
        "endpoint",
        "request",
        "quota",
        "quota",
    ]
    assert gate.classify(ToolFailure(ErrorCode.FILE_NOT_FOUND, "gone"), None) is None
    assert gate.classify(ConfigError("no"), None) is None


def test_unknown_model_of_a_line_is_an_input_failure(gate: RunGate) -> None:
    unknown = ModelDenied("no model 'x'", is_unknown_model=True)
    assert gate.classify(unknown, None) is unknown
    gate.check_model(None)
    assert gate.classify(unknown, "x") is None
    with pytest.raises(ModelDenied, match="no model 'x'"):
        gate.check_model("x")
    gate.check_model("y")
    key = ModelDenied("the key")
    assert gate.classify(key, "x") is key
