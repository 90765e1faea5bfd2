"""The test worker for authors of tools: its results must equal the results of a real worker."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest

from toolcrew import CallContext, tool
from toolcrew.contract.errors import ErrorCode
from toolcrew.workers.custom.testing import LocalWorker


def refuse_blank(arguments: dict[str, Any]) -> str | None:
    return None if arguments["text"].strip() else "give a text that is not blank"


@tool(validators=[refuse_blank])
def count(text: str, times: int = 1) -> dict[str, int]:
    """Count characters."""
    return {"characters": len(text) * times}


@tool(timeout_s=0.2)
def sleep(seconds: float) -> None:
    """Sleep, and take no for an answer to exceptions only."""
    try:
        time.sleep(seconds)
    except Exception:  # noqa: BLE001  # what such a tool does
        time.sleep(seconds)


@tool(timeout_s=0.2)
async def sleep_async(seconds: float) -> None:
    """Sleep on the loop."""
    await asyncio.sleep(seconds)


@pytest.mark.parametrize("name", ["sleep", "sleep_async"])
def test_a_tool_is_stopped_at_its_timeout_and_the_next_call_works(name: str) -> None:
    worker, started = LocalWorker(sleep, sleep_async, count), time.monotonic()
    result = worker.call(name, {"seconds": 30})
    assert result.error_code == ErrorCode.TIMEOUT
    assert result.error == f"{name} did not end within its limit of 0.2 s and was stopped"
    assert time.monotonic() - started < 10
    assert worker.call("count", {"text": "a"}).success


def test_a_tool_that_cannot_be_stopped_has_an_unknown_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolcrew.workers.custom.testing.POOL_GRACE_S", 0.1)

    @tool(timeout_s=0.1)
    def catch_everything() -> str:
        """Catch everything."""
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            with contextlib.suppress(BaseException):
                time.sleep(0.05)
        return "done"

    result = LocalWorker(catch_everything).call("catch_everything")
    assert result.error_code == ErrorCode.OUTCOME_UNKNOWN
    assert "would have killed its process" in str(result.error)


def test_the_local_state_has_the_size_limits_of_redis() -> None:
    @tool
    async def fill(context: CallContext, values: int, size: int) -> None:
        """Fill it."""
        for number in range(values):
            await context.state.set(f"k{number}", "x" * size)

    worker = LocalWorker(fill)
    assert worker.call("fill", {"values": 1, "size": 70_000}).error_code is ErrorCode.NO_SPACE
    assert worker.call("fill", {"values": 20, "size": 60_000}).error_code is ErrorCode.NO_SPACE


def test_signal_handlers_and_timers_of_the_test_process_are_restored() -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        raise AssertionError("the signal was not ours to send on")

    before = signal.signal(signal.SIGUSR1, handler)
    old = signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        LocalWorker(sleep).call("sleep", {"seconds": 5})
        assert signal.getsignal(signal.SIGUSR1) is handler
        assert 400 < signal.getitimer(signal.ITIMER_REAL)[0] < 500
    finally:
        signal.setitimer(signal.ITIMER_REAL, *old)
        signal.signal(signal.SIGUSR1, before)


async def test_a_call_in_an_event_loop_is_refused() -> None:
    with pytest.raises(RuntimeError, match="a test that is not async"):
        LocalWorker(count).call("count", {"text": "a"})


def test_a_call_in_another_thread_is_refused() -> None:
    messages: list[BaseException] = []

    def call() -> None:
        try:
            LocalWorker(count).call("count", {"text": "a"})
        except RuntimeError as error:
            messages.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "from the main thread" in str(messages[0])


def test_the_test_worker_imports_no_orchestrator_packages() -> None:
    code = (
        "import sys, toolcrew.workers.custom.testing; print([m for m in ('orchestrator', 'openai', 'docker', 'typer', "
        "'fastapi') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
