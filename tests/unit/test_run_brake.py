"""The brake: what is no fault of a run holds it back, and costs it nothing; what is its own trouble ends it in time."""

from collections.abc import AsyncIterator

import pytest

from contract.errors import (
    ConfigError,
    ErrorCode,
    ModelDenied,
    ModelInterrupted,
    ModelRefused,
    ModelUnavailable,
    ToolFailure,
)
from orchestrator.dialects.model import Chunk, ModelRequest
from orchestrator.runs.brake import (
    MAX_HOLDS,
    MAX_LONE_HOLDS,
    PAUSES_S,
    ROOM_AGAIN_S,
    Brake,
    EndpointAway,
    HeldModel,
    NotNow,
)

REQUEST = ModelRequest([{"role": "user", "content": "hello"}])


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Replies:
    """A model that answers with these one after another: a chunk, or an error."""

    name = "m"

    def __init__(self, *replies: Exception | Chunk) -> None:
        self._replies = list(replies)

    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        yield reply

    async def aclose(self) -> None:
        """Nothing is held."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def brake(clock: Clock) -> Brake:
    return Brake(clock)


def fail(
    brake: Brake, run: str = "a", error: ModelUnavailable | None = None, answered: str | None = None
) -> ModelUnavailable:
    """What a run hears of a request that failed so, while that other run was answered."""

    def ask() -> None:
        with brake.asking(run):
            if answered is not None:
                brake.note_answer(answered)
            raise error or ModelUnavailable("down")

    with pytest.raises(ModelUnavailable) as caught:
        ask()
    return caught.value


def test_a_model_that_answers_nobody_stops_the_claims_until_one_run_is_answered(brake: Brake, clock: Clock) -> None:
    assert brake.room(16, 0) == 16
    assert isinstance(fail(brake), EndpointAway)
    assert brake.room(16, 0) == 0
    for pause_s in (*PAUSES_S, PAUSES_S[-1]):
        clock.now += pause_s - 0.1
        assert brake.room(16, 0) == 0
        clock.now += 0.2
        assert [brake.room(16, 0), brake.room(16, 0)] == [1, 0]
    assert brake.away_s == pytest.approx(sum(PAUSES_S) + PAUSES_S[-1] + 0.1 * (len(PAUSES_S) + 1))
    brake.note_answer("a")
    assert (brake.away_s, brake.room(16, 3)) == (None, 16)


def test_nobody_looks_while_there_is_no_room(brake: Brake, clock: Clock) -> None:
    fail(brake)
    clock.now += PAUSES_S[0]
    assert [brake.room(0, 16), brake.room(1, 15)] == [0, 1]


def test_a_request_that_fails_while_others_are_answered_is_the_runs_own_trouble(brake: Brake) -> None:
    error = fail(brake, answered="b")
    assert isinstance(error, EndpointAway)
    assert (error.is_lone, brake.away_s) == (True, None)


def test_a_run_is_held_so_often_and_then_its_failure_is_its_own(brake: Brake) -> None:
    held = [fail(brake) for _ in range(MAX_HOLDS + 1)]
    assert [isinstance(error, EndpointAway) for error in held] == [True] * MAX_HOLDS + [False]
    assert isinstance(fail(brake), EndpointAway)
    alone = [fail(brake, "poison", answered="b") for _ in range(MAX_LONE_HOLDS + 1)]
    assert [isinstance(error, EndpointAway) for error in alone] == [True] * MAX_LONE_HOLDS + [False]


def test_an_answer_makes_good_what_runs_were_held_for(brake: Brake, clock: Clock) -> None:
    for _ in range(3 * MAX_HOLDS):
        assert isinstance(fail(brake), EndpointAway)
        brake.note_answer("b")
        clock.now += 1
    for _ in range(3 * MAX_LONE_HOLDS):
        assert isinstance(fail(brake, answered="b"), EndpointAway)
        brake.note_answer("a")


@pytest.mark.parametrize("error", [ModelRefused("400"), ModelInterrupted("cut"), ModelDenied("401")])
def test_what_waiting_does_not_mend_is_not_waited_for(brake: Brake, error: ModelUnavailable) -> None:
    assert fail(brake, error=error) is error
    assert brake.away_s is None


async def test_the_first_chunk_says_that_the_model_is_there(brake: Brake) -> None:
    chunk: Chunk = {"choices": []}
    model = HeldModel(Replies(ModelUnavailable("down"), chunk), brake, "a")
    with pytest.raises(EndpointAway):
        _ = [one async for one in model.stream(REQUEST)]
    with pytest.raises(ModelUnavailable, match="had not begun to answer"):
        model.check_heard()
    assert [one async for one in model.stream(REQUEST)] == [chunk]
    assert brake.away_s is None
    model.check_heard()


def test_a_quota_lets_begin_as_many_as_there_was_room_for_and_then_one_more_at_a_time(
    brake: Brake, clock: Clock
) -> None:
    brake.note_quota(4)
    assert [brake.room(12, 4), brake.room(13, 3)] == [0, 1]
    clock.now += ROOM_AGAIN_S
    assert [brake.room(12, 4), brake.room(11, 5)] == [1, 0]
    brake.note_quota(0)
    assert brake.room(16, 0) == 0
    for _ in range(16):
        clock.now += ROOM_AGAIN_S
        brake.room(16, 0)
    assert brake.room(100, 0) == 100


def test_what_ended_a_runs_work_is_judged_by_whose_fault_it_is(brake: Brake) -> None:
    told = [
        brake.judge(EndpointAway("down", is_lone=False), None),
        brake.judge(EndpointAway("500", is_lone=True), None),
        brake.judge(ToolFailure(ErrorCode.QUOTA_EXCEEDED, "full"), None),
        brake.judge(ToolFailure(ErrorCode.RATE_LIMITED, "slower"), None),
    ]
    assert [reason.cause if isinstance(reason, NotNow) else reason for reason in told] == [
        "endpoint",
        "request",
        "quota",
        "quota",
    ]
    assert brake.judge(ToolFailure(ErrorCode.FILE_NOT_FOUND, "gone"), None) is None
    assert brake.judge(ConfigError("no"), None) is None


def test_a_model_that_a_line_names_and_nobody_knows_is_the_lines_fault_and_asked_for_once(brake: Brake) -> None:
    unknown = ModelDenied("no model 'x'", is_unknown_model=True)
    assert brake.judge(unknown, None) is unknown
    brake.check_model(None)
    assert brake.judge(unknown, "x") is None
    with pytest.raises(ModelDenied, match="no model 'x'"):
        brake.check_model("x")
    brake.check_model("y")
    key = ModelDenied("the key")
    assert brake.judge(key, "x") is key
