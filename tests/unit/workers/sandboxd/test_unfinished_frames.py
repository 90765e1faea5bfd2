"""Frames that guests begin and do not finish take a limited part of sandboxd's memory, over all sandboxes."""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import ClassVar

import pytest

from toolcrew.workers.sandboxd import frames
from toolcrew.workers.sandboxd.frames import MAX_UP, GuestChannel, UnfinishedFrames, encode_frame

SIZE = 1000
FRAME = encode_frame({"ev": "data"}, b"x" * (SIZE - 50), max_total=MAX_UP)


class SilentTransport(asyncio.Transport):
    def abort(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Guest:
    """A guest, and what sandboxd has received from it."""

    opened: ClassVar[list["Guest"]] = []

    def __init__(self, tenant: str = "acme") -> None:
        self.frames = 0
        self.lost = list[str]()
        stderr = os.open(os.devnull, os.O_RDONLY)
        self.channel = GuestChannel(lambda _: self._count(), self.lost.append, stderr, lambda: tenant)
        self.channel.connection_made(SilentTransport())
        self.opened.append(self)

    def _count(self) -> None:
        self.frames += 1

    def send(self, data: bytes) -> None:
        self.channel.data_received(data)


@pytest.fixture
async def limited(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    unfinished = UnfinishedFrames(5 * SIZE)
    monkeypatch.setattr(frames, "_unfinished", {asyncio.get_running_loop(): unfinished})
    yield
    for guest in Guest.opened:
        guest.channel.close()
    Guest.opened.clear()


@pytest.mark.usefixtures("limited")
async def test_guests_that_finish_no_frame_are_closed_and_others_are_not() -> None:
    hostile, honest = [Guest() for _ in range(20)], Guest()
    for guest in hostile:
        guest.send(FRAME[:-1])
        honest.send(FRAME[:-1])
        honest.send(FRAME[-1:])
    assert (honest.lost, honest.frames) == ([], 20)
    assert 15 <= sum(bool(guest.lost) for guest in hostile) <= 17
    assert hostile[0].lost
    assert not hostile[-1].lost


@pytest.mark.usefixtures("limited")
async def test_a_paused_guest_is_not_closed_for_its_unfinished_frame() -> None:
    paused, later = Guest(), [Guest() for _ in range(10)]
    paused.send(FRAME[:-1])
    paused.channel.pause()
    for guest in later:
        guest.send(FRAME[:-1])
    assert not paused.lost
    paused.channel.resume()
    paused.send(FRAME[-1:])
    assert (paused.frames, paused.lost) == (1, [])


@pytest.mark.usefixtures("limited")
async def test_a_guest_that_sends_single_bytes_gains_no_time() -> None:
    slow, later = Guest(), [Guest() for _ in range(5)]
    slow.send(FRAME[:500])
    for guest in later:
        guest.send(FRAME[:-1])
        slow.send(b"x")
    assert slow.lost
    assert not later[-1].lost


@pytest.mark.usefixtures("limited")
async def test_the_guests_of_one_tenant_close_no_channel_of_another() -> None:
    honest = [Guest("honest"), Guest("other")]
    for guest in honest:
        guest.send(FRAME[:-1])
    hostile = [Guest("hostile") for _ in range(20)]
    for guest in hostile:
        guest.send(FRAME[:-1])
    for guest in honest:
        guest.send(FRAME[-1:])
    assert [(guest.lost, guest.frames) for guest in honest] == [([], 1)] * 2
    assert sum(bool(guest.lost) for guest in hostile) >= 16
