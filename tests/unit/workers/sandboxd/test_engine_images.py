"""Pulls through engines that fail, on real sockets. A pull ends with an error of limited size, and in time."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.sandboxd.engine_stubs import (
    Behaviour,
    answers_nothing,
    answers_something_else,
    drips,
    refuses,
    stalls_in_its_header,
    stub_engine,
    talks_garbage,
)
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.image_names import parse_image_name
from toolcrew.workers.sandboxd.runtime import engine_images
from toolcrew.workers.sandboxd.runtime.engine import Engine
from toolcrew.workers.sandboxd.runtime.engine_images import EngineImages, PullFailed, PullProgress, RegistryAccount

NAME = parse_image_name("ghcr.io/team/tool:v1")
_VERSION = b'{"ApiVersion": "1.41", "Version": "20.10.0"}'
_DOWNLOADING = {"status": "Downloading", "id": "a", "progressDetail": {"current": 5, "total": 50}}


def pulls(*events: Mapping[str, Any], then_hangs: bool = False, repeats: bool = False) -> Behaviour:
    """Return an engine that reports these events of a pull."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.read(65536):
            if b"GET /version" in head:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(_VERSION) + _VERSION)
                continue
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
            is_first = True
            while is_first or repeats:
                is_first = False
                for event in events:
                    line = json.dumps(event).encode() + b"\r\n"
                    writer.write(b"%x\r\n%s\r\n" % (len(line), line))
                await writer.drain()
                await asyncio.sleep(0.01)
            if then_hangs:
                await answers_nothing(reader, writer)
            writer.write(b"0\r\n\r\n")

    return behave


async def pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: Behaviour, account: RegistryAccount | None = None
) -> PullProgress:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/engine.sock")
    monkeypatch.setattr(engine_images, "SILENCE_S", 0.3)
    progress = PullProgress()
    async with stub_engine(tmp_path / "engine.sock", behaviour), asyncio.timeout(SOON_S):
        await EngineImages(Engine()).pull(NAME, account, progress)
    return progress


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (answers_nothing, "no progress for|does not answer"),
        (stalls_in_its_header, "no progress for|does not answer"),
        (talks_garbage, "does not answer"),
        (refuses(b"no such image"), "no such image"),
        (answers_something_else, "cannot be read|does not answer"),
        (pulls(_DOWNLOADING, then_hangs=True), "no progress for 0.3 s"),
        (pulls({"error": "manifest unknown" + "x" * 9999}), "manifest unknown"),
        (pulls({"progressDetail": 5, "status": "Downloading"}, {"error": 7}), "7"),
    ],
)
async def test_a_pull_through_a_faulty_engine_fails_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: Behaviour, message: str
) -> None:
    with pytest.raises(PullFailed, match=message) as failed:
        await pull(tmp_path, monkeypatch, behaviour, RegistryAccount("robot", "very-secret"))
    assert len(str(failed.value)) < 700
    assert "very-secret" not in repr(failed.value)


@pytest.mark.parametrize("behaviour", [pulls(_DOWNLOADING, repeats=True), drips], ids=["repeats", "drips"])
async def test_a_pull_without_an_end_has_a_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: Behaviour
) -> None:
    monkeypatch.setattr(engine_images, "PULL_S", 0.3)
    with pytest.raises(PullFailed, match="is not complete after"):
        await pull(tmp_path, monkeypatch, behaviour)


async def test_a_pull_is_stopped_at_its_next_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/engine.sock")
    progress = PullProgress()
    async with stub_engine(tmp_path / "engine.sock", pulls(_DOWNLOADING, repeats=True)), asyncio.timeout(SOON_S):
        pulling = asyncio.create_task(EngineImages(Engine()).pull(NAME, None, progress))
        await wait_until_async(lambda: progress.bytes() != (0, 0), SOON_S, "the pull begins")
        progress.stop()
        with pytest.raises(PullFailed, match="has stopped"):
            await pulling
