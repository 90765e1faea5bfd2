"""Measure the memory of a run that waits for its model.

1,000 runs wait at once in one process. Each run has completed one call and has an open stream.
"""

import asyncio
import gc
import json
import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.loop_step import SPEC, _answer
from benchmarks.memory import memory_of_process
from benchmarks.report import Report
from benchmarks.sizes import size
from toolcrew.contract.run_events import RunEvent, TextArrived
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.loop.agent import Agent
from toolcrew.orchestrator.models.openai import OpenAIModel

WAITING = size(1000, 20)
AT_A_TIME = size(50, 10)
# The backlog is larger than the number of concurrent connections. The kernel drops a connection that does not fit
# into the backlog without an error, and its run would wait without end.
BACKLOG = 1024
_CALL = {"index": 0, "id": "call", "function": {"name": "echo", "arguments": json.dumps({"text": "some text"})}}
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _event(data: str) -> bytes:
    line = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(line), line)


def _chunk(delta: dict[str, Any], finish: str | None) -> bytes:
    return _event(json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}))


async def _serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the first request of a run with a call. Answer the second request with the first chunk, and leave the
    stream open.
    """
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        size = int(
            next(line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        )
        body = json.loads(await reader.readexactly(size))
        if len(body["messages"]) == 2:
            writer.write(
                _HEAD
                + _chunk({"tool_calls": [_CALL]}, None)
                + _chunk({}, "tool_calls")
                + _event("[DONE]")
                + b"0\r\n\r\n"
            )
        else:
            writer.write(_HEAD + _chunk({"content": "Let"}, None))


def _serve(listener: socket.socket) -> None:
    async def forever() -> None:
        server = await asyncio.start_server(_serve_one, sock=listener, backlog=BACKLOG)
        await server.serve_forever()

    asyncio.run(forever())


@contextmanager
def _model_server() -> Iterator[int]:
    """Start a chat server in a separate process and yield its port."""
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listener:
        process = multiprocessing.get_context("fork").Process(target=_serve, args=(listener,), daemon=True)
        process.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            process.kill()
            process.join()


async def _waiting(model: OpenAIModel, runs: int) -> list[asyncio.Task[Any]]:
    """Start this many runs and return when each has an open stream. The caller cancels the returned tasks."""
    began = asyncio.Semaphore(0)

    def on_event(event: RunEvent) -> None:
        if isinstance(event, TextArrived):
            began.release()

    agent = Agent(model, NativeDialect(), [SPEC], _answer, on_event=on_event)
    tasks: list[asyncio.Task[Any]] = []
    while len(tasks) < runs:
        some = [asyncio.create_task(agent.run("Say it again.")) for _ in range(min(AT_A_TIME, runs - len(tasks)))]
        for task in some:
            task.add_done_callback(lambda _: began.release())  # a run that fails is reported, not waited for
        for _ in some:
            await began.acquire()
        for task in some:
            if task.done():
                raise RuntimeError(f"A run ended before its model stopped answering: {task.result()}")
        tasks += some
    return tasks


async def _measure(port: int) -> Report:
    model = OpenAIModel("bench", f"http://127.0.0.1:{port}/v1", retries=0)
    tasks = await _waiting(model, AT_A_TIME)  # Imports and caches that the first runs load are not counted.
    gc.collect()
    before = memory_of_process("self")["rss"]
    tasks += await _waiting(model, WAITING - AT_A_TIME)
    gc.collect()
    each = (memory_of_process("self")["rss"] - before) / (WAITING - AT_A_TIME)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await model.aclose()
    report = Report(
        "waiting_runs",
        notes=[f"{WAITING} runs in one process, each with an HTTP stream of the model open, after one call"],
    )
    report.add("run_bytes", each, "a run that waits for its model, resident", at_most=100 * 1024)
    return report


def run() -> Report:
    with _model_server() as port:
        return asyncio.run(_measure(port))
