"""Execution of calls: order, concurrency, text arguments, and the guard against repetition."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.records.builders import build_spec
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.registry import Switch
from toolcrew.contract.run_events import RunEvent
from toolcrew.orchestrator.dialects.base import CallRequested, MalformedCall
from toolcrew.orchestrator.loop.call_runner import CallRunner

READ = build_spec("read", read_only=True, properties={"n": {"type": "integer"}}, required=[])
WRITE = build_spec("write", properties={"n": {"type": "integer"}}, required=[])


def build_call_runner(
    run_call: Callable[[ToolCall], Awaitable[ToolResult]],
    *,
    events: list[RunEvent] | None = None,
    max_parallel: int = 8,
) -> CallRunner:
    return CallRunner("r", [READ, WRITE], run_call, (events if events is not None else []).append, max_parallel)


def build_request(
    name: str, index: int, *, is_parallel: bool = True, is_text: bool = False, **arguments: Any
) -> CallRequested:
    call = ToolCall(id=f"r-1-{index}", name=name, arguments=arguments)
    return CallRequested(call, "", f"m{index}", is_text, is_parallel)


def done(call: ToolCall, output: str = "ok", **fields: Any) -> ToolResult:
    return ToolResult(call_id=call.id, name=call.name, success=True, output=output, **fields)


async def test_a_skill_called_as_a_tool_is_loaded_with_skill_tool() -> None:
    calls: list[ToolCall] = []

    async def run_call(call: ToolCall) -> ToolResult:
        calls.append(call)
        return done(call)

    def build_runner(*names: str) -> CallRunner:
        return CallRunner(
            "r",
            [build_spec(name) for name in names],
            run_call,
            lambda _: None,
            8,
            {"off": Switch()},
            {"pdf-forms", "named", "off"},
        )

    ((_, loaded),) = await build_runner("skill_tool", "named").run([build_request("pdf-forms", 1, page=3)])
    assert (loaded.success, calls[0].name) == (True, "skill_tool")
    assert calls[0].arguments == {"name": "pdf-forms", "action": "load"}
    # One that is a tool by itself is called, one that is off stays off, and without skill_tool there are no skills.
    await build_runner("skill_tool", "named").run([build_request("named", 2)])
    assert calls[1].name == "named"
    assert (await build_runner("skill_tool").run([build_request("off", 3)]))[0][1].error_code is ErrorCode.TOOL_DISABLED
    assert (await build_runner("named").run([build_request("pdf-forms", 4)]))[0][1].error == "Tool not found: pdf-forms"
    unknown = (await build_runner("skill_tool").run([build_request("pdf-form", 5)]))[0][1]
    assert unknown.metadata["nearest"][0] == "pdf-forms"  # type: ignore[index]
    assert unknown.error is not None
    assert unknown.error.startswith("Tool not found: pdf-form; ")
    assert len(calls) == 2


class Gate:
    """A tool whose calls wait until a given number run at once, or until `is_open` is set. Records the number of
    concurrent calls and their order of start.
    """

    def __init__(self, is_open: bool = False) -> None:
        self.started: list[str] = []
        self.running = self.max_running = 0
        self.three_run = asyncio.Event()
        self.is_open = asyncio.Event()
        if is_open:
            self.is_open.set()

    async def run(self, call: ToolCall) -> ToolResult:
        self.started.append(call.id)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        if self.running == 3:
            self.three_run.set()
        try:
            await asyncio.sleep(0)
            await self.is_open.wait()
        finally:
            self.running -= 1
        return done(call, call.id)


@pytest.mark.parametrize(
    "requests",
    [
        [build_request("write", 0), build_request("write", 1)],
        [build_request("read", 0), build_request("write", 1), build_request("read", 2)],
        [build_request("read", 0, is_parallel=False), build_request("read", 1, is_parallel=False)],
    ],
    ids=["writing", "mixed", "not requested as parallel"],
)
async def test_calls_that_are_not_parallel_run_in_order(requests: list[CallRequested]) -> None:
    gate = Gate(is_open=True)
    await build_call_runner(gate.run).run(requests)
    assert (gate.max_running, gate.started) == (1, [request.call.id for request in requests])


async def test_parallel_calls_stay_within_the_limit() -> None:
    gate = Gate(is_open=True)
    await build_call_runner(gate.run, max_parallel=2).run([build_request("read", n) for n in range(6)])
    assert (gate.max_running, len(gate.started)) == (2, 6)


async def test_results_of_parallel_calls_are_in_the_order_of_the_requests() -> None:
    ended = {f"r-1-{number}": asyncio.Event() for number in range(4)}
    ended["r-1-3"].set()

    async def run_call(call: ToolCall) -> ToolResult:
        # The last call ends first.
        number = int(call.id[-1])
        await ended[call.id].wait()
        if number:
            ended[f"r-1-{number - 1}"].set()
        return done(call, call.id)

    async with asyncio.timeout(20):
        observed = await build_call_runner(run_call).run([build_request("read", number) for number in range(4)])
    assert [(model_id, result.output) for model_id, result in observed] == [(f"m{n}", f"r-1-{n}") for n in range(4)]


async def test_a_failing_parallel_call_does_not_end_the_others() -> None:
    async def run_call(call: ToolCall) -> ToolResult:
        await asyncio.sleep(0)
        if call.id == "r-1-0":
            raise ToolFailure(ErrorCode.TIMEOUT, "too slow")
        if call.id == "r-1-1":
            raise KeyError("k")
        return done(call)

    results = [
        result for _, result in await build_call_runner(run_call).run([build_request("read", n) for n in range(3)])
    ]
    assert [result.error_code for result in results] == [ErrorCode.TIMEOUT, ErrorCode.INTERNAL, None]


async def test_text_arguments_are_converted_to_the_schema_types() -> None:
    calls: list[ToolCall] = []

    async def run_call(call: ToolCall) -> ToolResult:
        calls.append(call)
        return done(call)

    await build_call_runner(run_call).run(
        [
            build_request("read", 0, is_text=True, n="5"),
            build_request("read", 1, n="5"),
            build_request("read", 2, is_text=True, n="5.5"),
        ]
    )
    assert [call.arguments["n"] for call in calls] == [5, "5", "5.5"]


class RepeatingModel:
    """Answers each call as the test says, and collects the messages that the model reads."""

    def __init__(self, answer: Callable[[ToolCall], ToolResult]) -> None:
        async def run_call(call: ToolCall) -> ToolResult:
            return answer(call)

        self._runner = build_call_runner(run_call)

    async def ask(self, request: CallRequested | MalformedCall) -> str:
        [(_, result)] = await self._runner.run([request])
        return result.text()


async def test_the_third_identical_failing_call_adds_a_warning() -> None:
    model = RepeatingModel(lambda call: ToolResult.failed(call, ErrorCode.FILE_NOT_FOUND, "no such file"))
    messages = [await model.ask(build_request("read", index, path="a")) for index in range(4)]
    assert messages[0] == messages[1] == "Error [FILE_NOT_FOUND]: no such file"
    assert messages[2].startswith(
        "Error [FILE_NOT_FOUND]: no such file\nThis exact call has now failed 3 times. Do not send it again"
    )
    assert "failed 4 times" in messages[3]


async def test_a_repeated_nonzero_exit_code_adds_the_warning() -> None:
    model = RepeatingModel(lambda call: done(call, "not found\n[exit code 127]", metadata={"exit_code": 127}))
    messages = [await model.ask(build_request("write", index)) for index in range(3)]
    assert messages[0] == messages[1]
    assert "This exact call" in messages[2]
