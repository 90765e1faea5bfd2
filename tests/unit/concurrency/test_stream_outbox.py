"""The order of frames that wait, and their memory."""

from hypothesis import given
from hypothesis import strategies as st

from toolcrew.concurrency.stream_outbox import MemoryCount, StreamOutbox
from toolcrew.contract.stream_protocol import EPOCH_HEADER, STDERR, FrameKind, StreamDecoder, StreamFrame


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def take_all(outbox: StreamOutbox, size: int = 1 << 30) -> list[StreamFrame]:
    return StreamDecoder().feed(outbox.take(size))


def data(stream: int, payload: bytes, offset: int = 0, flags: int = 0) -> StreamFrame:
    return StreamFrame(FrameKind.DATA, stream, offset, payload, flags)


def test_answers_and_credits_come_before_data() -> None:
    outbox = StreamOutbox()
    outbox.put(data(1, b"x"))
    outbox.put(StreamFrame(FrameKind.CREDIT, 1, 5))
    outbox.put(StreamFrame(FrameKind.REPLY, 2, payload=b"{}"))
    assert [frame.kind.name for frame in take_all(outbox)] == ["REPLY", "CREDIT", "DATA"]


def test_the_end_of_a_stream_follows_its_data() -> None:
    outbox = StreamOutbox()
    outbox.put(data(1, b"x"))
    outbox.put(StreamFrame(FrameKind.END, 1, payload=b"{}"))
    outbox.put(StreamFrame(FrameKind.END, 2, payload=b"{}"))
    assert [(frame.kind.name, frame.stream) for frame in take_all(outbox)] == [("END", 2), ("DATA", 1), ("END", 1)]
    assert outbox.is_empty


def test_a_stream_with_few_bytes_passes_a_stream_with_many() -> None:
    outbox = StreamOutbox(clock=Clock())
    for piece in range(5):
        outbox.put(data(1, bytes(30_000), piece * 30_000))
    first = outbox.take(1)
    outbox.put(data(2, b"key"))
    assert len(first) > 30_000
    assert [frame.stream for frame in take_all(outbox)] == [2, 1, 1, 1, 1]


def test_streams_with_many_bytes_take_turns() -> None:
    outbox = StreamOutbox(clock=Clock())
    for piece in range(3):
        for stream in (1, 2, 3):
            outbox.put(data(stream, bytes(30_000), piece * 30_000))
    assert [frame.stream for frame in take_all(outbox)] == [1, 2, 3, 1, 2, 3, 1, 2, 3]


def test_small_pieces_are_merged_but_not_two_kinds_of_output() -> None:
    outbox = StreamOutbox()
    for at in range(2000):
        outbox.put(data(1, b"x", at))
    outbox.put(data(1, b"e", 2000, STDERR))
    frames = take_all(outbox)
    assert [(frame.offset, len(frame.payload), frame.flags) for frame in frames] == [(0, 2000, 0), (2000, 1, STDERR)]


def test_a_later_credit_replaces_an_earlier_one() -> None:
    outbox = StreamOutbox()
    for offset in range(10_000):
        outbox.put(StreamFrame(FrameKind.CREDIT, 1, offset))
    assert [frame.offset for frame in take_all(outbox)] == [9999]


def test_a_forgotten_stream_leaves_no_memory() -> None:
    total = MemoryCount()
    outbox = StreamOutbox(total)
    outbox.put(data(1, bytes(10_000)))
    outbox.put(data(2, bytes(20_000)))
    outbox.put(StreamFrame(FrameKind.CREDIT, 1, 5))
    outbox.forget(1)
    assert 20_000 < outbox.memory == total.bytes < 21_000
    assert [frame.stream for frame in take_all(outbox)] == [2]
    assert (outbox.memory, total.bytes) == (0, 0)


@given(st.data())
def test_frames_of_a_stream_keep_their_order_and_the_memory_is_exact(drawn: st.DataObject) -> None:
    outbox = StreamOutbox()
    positions, ended, received = dict.fromkeys(range(1, 4), 0), set[int](), {number: b"" for number in range(1, 4)}
    sent = {number: b"" for number in range(1, 4)}
    for _ in range(drawn.draw(st.integers(0, 40))):
        stream = drawn.draw(st.sampled_from([1, 2, 3]))
        action = drawn.draw(st.sampled_from(["data", "credit", "end", "take"]))
        if action == "take":
            collect(outbox.take(drawn.draw(st.integers(1, 20_000))), received)
        elif stream in ended:
            continue
        elif action == "data":
            payload = bytes([positions[stream] % 251]) * drawn.draw(st.integers(1, 9000))
            outbox.put(data(stream, payload, positions[stream], drawn.draw(st.sampled_from([0, STDERR]))))
            positions[stream] += len(payload)
            sent[stream] += payload
        elif action == "credit":
            outbox.put(StreamFrame(FrameKind.CREDIT, stream, positions[stream]))
        else:
            ended.add(stream)
            outbox.put(StreamFrame(FrameKind.END, stream, payload=b"{}"))
    collect(outbox.take(1 << 30), received)
    assert received == sent
    assert (outbox.memory, outbox.is_empty) == (0, True)


def collect(encoded: bytes, received: dict[int, bytes]) -> None:
    for frame in StreamDecoder().feed(encoded):
        if frame.kind is FrameKind.DATA:
            assert frame.offset == len(received[frame.stream])
            received[frame.stream] += frame.payload


def test_data_is_cut_for_channels_only() -> None:
    channel, client = StreamOutbox(), StreamOutbox(has_epochs=False)
    for outbox in (channel, client):
        outbox.put(data(1, EPOCH_HEADER * 100))
        assert outbox.take(1 << 20).endswith(EPOCH_HEADER[-8:])
    assert (channel.count_sent(), client.count_sent(), channel.count_sent()) == (101, 1, 0)
