"""The rules of one stream: every frame of either side in every state."""

from dataclasses import dataclass, field

import pytest

from toolcrew.contract.errors import StreamLost
from toolcrew.contract.stream_protocol import BULK_WINDOW_BYTES, LAST, MAX_DATA_BYTES, FrameKind, StreamFrame
from toolcrew.workers.stream_gateway.relays import RelayState, StreamRelay, StreamViolation


@dataclass
class Side:
    """One side of a relay, which only records."""

    sent: list[StreamFrame] = field(default_factory=list)
    removed: list[StreamRelay] = field(default_factory=list)
    memory: int = 0

    def send(self, frame: StreamFrame) -> None:
        self.sent.append(frame)

    def memory_of(self, stream: int) -> int:
        return self.memory

    def remove(self, relay: StreamRelay) -> None:
        self.removed.append(relay)

    @property
    def kinds(self) -> list[str]:
        return [frame.kind.name for frame in self.sent]


class Case:
    """A relay between stream 3 of a client and stream 8 of a channel."""

    def __init__(self, kind: FrameKind = FrameKind.OPEN) -> None:
        self.client, self.sandbox = Side(), Side()
        self.relay = StreamRelay(self.client, self.sandbox, 3, 8, StreamFrame(kind, 8, payload=b"{}"))

    def opened(self) -> "Case":
        self.relay.start()
        self.up(FrameKind.OPENED, payload=b"{}")
        return self

    def up(self, kind: FrameKind, offset: int = 0, payload: bytes = b"", flags: int = 0) -> None:
        self.relay.pass_up(StreamFrame(kind, 8, offset, payload, flags))

    def down(self, kind: FrameKind, offset: int = 0, payload: bytes = b"", flags: int = 0) -> None:
        self.relay.pass_down(StreamFrame(kind, 3, offset, payload, flags))


def test_numbers_are_changed_in_both_directions() -> None:
    case = Case().opened()
    case.down(FrameKind.CREDIT, 100)
    case.up(FrameKind.CREDIT, 100)
    case.up(FrameKind.DATA, 0, b"up")
    case.down(FrameKind.DATA, 0, b"down", LAST)
    case.up(FrameKind.END, payload=b"{}")
    assert {frame.stream for frame in case.client.sent} == {3}
    assert {frame.stream for frame in case.sandbox.sent} == {8}
    assert case.client.kinds == ["OPENED", "CREDIT", "DATA", "END"]
    assert case.sandbox.kinds == ["OPEN", "CREDIT", "DATA"]
    assert (case.client.removed, case.sandbox.removed) == ([case.relay], [case.relay])


def test_a_credit_before_the_start_follows_open() -> None:
    case = Case()
    case.down(FrameKind.CREDIT, 100)
    assert case.sandbox.sent == []
    case.relay.start()
    assert case.sandbox.kinds == ["OPEN", "CREDIT"]


def test_a_stream_that_is_closed_before_its_start_reaches_no_sandbox() -> None:
    case = Case()
    case.down(FrameKind.CLOSE)
    assert (case.sandbox.sent, case.relay.state) == ([], RelayState.ENDED)


KINDS = [kind for kind in FrameKind if kind is not FrameKind.EPOCH]
ALLOWED_UP = {
    (RelayState.WAITING, FrameKind.OPEN): set[FrameKind](),
    (RelayState.OPENING, FrameKind.OPEN): {FrameKind.OPENED, FrameKind.END},
    (RelayState.OPEN, FrameKind.OPEN): {FrameKind.DATA, FrameKind.CREDIT, FrameKind.END},
    (RelayState.WAITING, FrameKind.CALL): set[FrameKind](),
    (RelayState.OPENING, FrameKind.CALL): {FrameKind.REPLY},
}
ALLOWED_DOWN = {
    (RelayState.WAITING, FrameKind.OPEN): {FrameKind.CREDIT, FrameKind.CLOSE},
    (RelayState.OPENING, FrameKind.OPEN): {FrameKind.CREDIT, FrameKind.CLOSE},
    (RelayState.OPEN, FrameKind.OPEN): {FrameKind.DATA, FrameKind.CREDIT, FrameKind.CLOSE},
    (RelayState.WAITING, FrameKind.CALL): {FrameKind.CLOSE},
    (RelayState.OPENING, FrameKind.CALL): {FrameKind.CLOSE},
}


def build_case(state: RelayState, first: FrameKind) -> Case:
    """Return a relay in a state, with credit in both directions."""
    case = Case(first)
    if state is not RelayState.WAITING:
        case.relay.start()
    if state is RelayState.OPEN:
        case.up(FrameKind.OPENED, payload=b"{}")
        case.up(FrameKind.CREDIT, 10)
        case.down(FrameKind.CREDIT, 10)
    return case


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("state", "first"), ALLOWED_UP, ids=lambda part: part.name)
def test_only_allowed_frames_pass(state: RelayState, first: FrameKind, kind: FrameKind) -> None:
    payload = b"x" if kind is FrameKind.DATA else b""
    for allowed, send in ((ALLOWED_UP, Case.up), (ALLOWED_DOWN, Case.down)):
        case = build_case(state, first)
        if kind in allowed[state, first]:
            send(case, kind, payload=payload)
        else:
            with pytest.raises(StreamViolation):
                send(case, kind, payload=payload)


BAD_DATA = {
    "a gap": (1, b"x", 0),
    "a repetition": (-1, b"x", 0),
    "above the credit": (0, b"x" * 11, 0),
    "empty": (0, b"", 0),
}


@pytest.mark.parametrize(("shift", "payload", "flags"), BAD_DATA.values(), ids=BAD_DATA.keys())
def test_data_begins_at_the_next_position_and_stays_below_the_credit(shift: int, payload: bytes, flags: int) -> None:
    for send in (Case.up, Case.down):
        case = build_case(RelayState.OPEN, FrameKind.OPEN)
        send(case, FrameKind.DATA, 0, b"1234")
        case.relay.up.credit = case.relay.down.credit = 14
        with pytest.raises(StreamViolation):
            send(case, FrameKind.DATA, 4 + shift, payload, flags)


def test_no_data_follows_the_last_bytes() -> None:
    for send in (Case.up, Case.down):
        case = build_case(RelayState.OPEN, FrameKind.OPEN)
        send(case, FrameKind.DATA, 0, b"1234", LAST)
        with pytest.raises(StreamViolation):
            send(case, FrameKind.DATA, 4, b"x")
        with pytest.raises(StreamViolation):
            send(case, FrameKind.DATA, 4, b"", LAST)


def test_a_credit_stays_within_the_largest_window() -> None:
    for send in (Case.up, Case.down):
        case = build_case(RelayState.OPEN, FrameKind.OPEN)
        send(case, FrameKind.CREDIT, BULK_WINDOW_BYTES)
        for too_far in (BULK_WINDOW_BYTES + 1, 2**64 - 1):
            with pytest.raises(StreamViolation):
                send(case, FrameKind.CREDIT, too_far)


def test_a_repeated_or_smaller_credit_changes_nothing() -> None:
    case = build_case(RelayState.OPEN, FrameKind.OPEN)
    sent = len(case.client.sent)
    case.up(FrameKind.CREDIT, 10)
    case.up(FrameKind.CREDIT, 3)
    assert (len(case.client.sent), case.relay.down.credit) == (sent, 10)


def test_an_unread_stream_with_tiny_frames_is_a_violation() -> None:
    case = build_case(RelayState.OPEN, FrameKind.OPEN)
    case.client.memory = 100 * MAX_DATA_BYTES
    case.up(FrameKind.DATA, 0, b"x")
    case.client.memory = 200 * MAX_DATA_BYTES
    with pytest.raises(StreamViolation):
        case.up(FrameKind.DATA, 1, b"x")


def test_an_error_ends_a_stream_once() -> None:
    case = Case().opened()
    case.relay.leave(StreamLost("x"))
    case.relay.leave(StreamLost("y"))
    assert case.client.kinds == ["OPENED", "END"]
    assert case.sandbox.kinds == ["OPEN", "CLOSE"]
