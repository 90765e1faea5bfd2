"""Execution of calls: order, concurrency, text arguments, and the guard against repetition."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from contract.calls import ToolCall, ToolResult
from contract.errors import ErrorCode, ToolFailure
from contract.registry import Switch
from contract.run_events import RunEvent
from orchestrator.dialects.base import CallRequested, MalformedCall
from orchestrator.loop.call_runner import CallRunner
from tests.builders import build_spec

READ = build_spec("read", read_only=True, properties={"n": {"type": "integer"}}, required=[])
WRITE = build_spec("write", properties={"n": {"type": "integer"}}, required=[])


def runner(
    run_call: Callable[[ToolCall], Awaitable[ToolResult]],
    *,
    events: list[RunEvent] | None = None,
    max_parallel: int = 8,
) -> CallRunner:
    return CallRunner("r", [READ, WRITE], run_call, (events if events is not None else []).append, max_parallel)


def asked(name: str, index: int, *, is_parallel: bool = True, is_text: bool = False, **arguments: Any) -> CallRequested:
    call = ToolCall(id=f"r-1-{index}", name=name, arguments=arguments)
    return CallRequested(call, "", f"m{index}", is_text, is_parallel)


def done(call: ToolCall, output: str = "ok", **fields: Any) -> ToolResult:
    return ToolResult(call_id=call.id, name=call.name, success=True, output=output, **fields)


async def test_a_skill_that_is_called_as_a_tool_gives_its_instructions() -> None:
    ran: list[ToolCall] = []

    async def run_call(call: ToolCall) -> ToolResult:
        ran.append(call)
        return done(call)

    def of(*names: str) -> CallRunner:
        return CallRunner(
            "r",
            [build_spec(name) for name in names],
            run_call,
            lambda _: None,
            8,
            {"off": Switch()},
            {"pdf-forms", "named", "off"},
        )

    ((_, loaded),) = await of("skill_tool", "named").run([asked("pdf-forms", 1, page=3)])
    assert (loaded.success, ran[0].name) == (True, "skill_tool")
    assert ran[0].arguments == {"name": "pdf-forms", "action": "load"}
    # One that is a tool by itself is called, one that is off stays off, and without skill_tool there are no skills.
    await of("skill_tool", "named").run([asked("named", 2)])
    assert ran[1].name == "named"
    assert (await of("skill_tool").run([asked("off", 3)]))[0][1].error_code is ErrorCode.TOOL_DISABLED
    assert (await of("named").run([asked("pdf-forms", 4)]))[0][1].error == "Tool not found: pdf-forms"
    unknown = (await of("skill_tool").run([asked("pdf-form", 5)]))[0][1]
    assert (unknown.error, unknown.metadata["nearest"][0]) == ("Tool not found: pdf-form", "pdf-forms")  # type: ignore[index]
    assert len(ran) == 2


class Gate:
    """A tool whose calls wait until a given number run at once, or until `free` is set. Records the number of
    concurrent calls and their order of start.
    """

    def __init__(self, free: bool = False) -> None:
        self.began: list[str] = []
        self.running = self.most = 0
        self.three_run = asyncio.Event()
        self.free = asyncio.Event()
        if free:
            self.free.set()

    async def run(self, call: ToolCall) -> ToolResult:
        self.began.append(call.id)
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running == 3:
            self.three_run.set()
        try:
            await asyncio.sleep(0)
            await self.free.wait()
        finally:
            self.running -= 1
        return done(call, call.id)


@pytest.mark.parametrize(
    "requests",
    [
        [asked("write", 0), asked("write", 1)],
        [asked("read", 0), asked("write", 1), asked("read", 2)],
        [asked("read", 0, is_parallel=False), asked("read", 1, is_parallel=False)],
    ],
    ids=["writing", "mixed", "not asked for"],
)
async def test_all_other_calls_run_one_after_another_in_order(requests: list[CallRequested]) -> None:
    gate = Gate(free=True)
    await runner(gate.run).run(requests)
    assert (gate.most, gate.began) == (1, [request.call.id for request in requests])


async def test_no_more_calls_run_at_once_than_allowed() -> None:
    gate = Gate(free=True)
    await runner(gate.run, max_parallel=2).run([asked("read", n) for n in range(6)])
    assert (gate.most, len(gate.began)) == (2, 6)


async def test_one_failing_call_does_not_end_its_neighbours() -> None:
    async def run_call(call: ToolCall) -> ToolResult:
        await asyncio.sleep(0)
        if call.id == "r-1-0":
            raise ToolFailure(ErrorCode.TIMEOUT, "too slow")
        if call.id == "r-1-1":
            raise KeyError("k")
        return done(call)

    results = [result for _, result in await runner(run_call).run([asked("read", n) for n in range(3)])]
    assert [result.error_code for result in results] == [ErrorCode.TIMEOUT, ErrorCode.INTERNAL, None]


async def test_text_arguments_become_the_schemas_types_and_json_ones_stay() -> None:
    calls: list[ToolCall] = []

    async def run_call(call: ToolCall) -> ToolResult:
        calls.append(call)
        return done(call)

    await runner(run_call).run(
        [asked("read", 0, is_text=True, n="5"), asked("read", 1, n="5"), asked("read", 2, is_text=True, n="5.5")]
    )
    assert [call.arguments["n"] for call in calls] == [5, "5", "5.5"]


class Stubborn:
    """Answers each call as the test says, and collects the messages that the model reads."""

    def __init__(self, answer: Callable[[ToolCall], ToolResult]) -> None:
        async def run_call(call: ToolCall) -> ToolResult:
            return answer(call)

        self._runner = runner(run_call)

    async def ask(self, request: CallRequested | MalformedCall) -> str:
        [(_, result)] = await self._runner.run([request])
        return result.text()


def failing(call: ToolCall) -> ToolResult:
    return ToolResult.failed(call, ErrorCode.FILE_NOT_FOUND, "no such file")


async def test_the_third_identical_failing_call_is_answered_with_a_changed_message() -> None:
    model = Stubborn(failing)
    messages = [await model.ask(asked("read", index, path="a")) for index in range(4)]
    assert messages[0] == messages[1] == "Error [FILE_NOT_FOUND]: no such file"
    assert messages[2].startswith(
        "Error [FILE_NOT_FOUND]: no such file\nThis exact call has now failed 3 times. Do not send it again"
    )
    assert "failed 4 times" in messages[3]


async def test_a_command_that_keeps_failing_counts_though_its_call_succeeds() -> None:
    model = Stubborn(lambda call: done(call, "not found\n[exit code 127]", metadata={"exit_code": 127}))
    messages = [await model.ask(asked("write", index)) for index in range(3)]
    assert messages[0] == messages[1]
    assert "This exact call" in messages[2]
