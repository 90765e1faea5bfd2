"""Calls run again: what is the same, what differs, and what cannot be run as it was."""

import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from contract.calls import Clocks, ToolCall, ToolResult
from contract.errors import ConfigError
from orchestrator.dialects.native import NativeDialect
from orchestrator.dispatch.sessions import Session
from orchestrator.loop.agent import Agent
from orchestrator.loop.events import CallSent
from orchestrator.models.scripted import Calls, ScriptedModel
from orchestrator.traces.masking import Masker
from orchestrator.traces.recorded_calls import RecordedCall, Told, load_calls
from orchestrator.traces.recorder import open_trace
from orchestrator.traces.replay import (
    BUT_FOR,
    MAX_COMPARED_LINES,
    MAX_DIFF_LINES,
    MAX_LINE_CHARS,
    OF_A_JOB,
    Comparing,
    ReplayReport,
    replay,
    without_volatile,
)
from orchestrator.traces.replay import Calls as Place
from tests.builders import build_call, build_spec
from tests.trace_ground import RUN, call_echo, echo, fail, run_traced


class FakeSession:
    """Answers calls by a function and keeps them."""

    def __init__(self, answer: Callable[[ToolCall], ToolResult] = echo) -> None:
        self._answer = answer
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        self.calls.append((name, dict(arguments)))
        return self._answer(ToolCall(id=f"new-{len(self.calls)}", name=name, arguments=dict(arguments)))


def take_a_session(session: Session) -> Place:
    """A pool's session is a place to replay in: the type checker and this test say so."""
    return session


def put(text: str, **fields: Any) -> Callable[[ToolCall], ToolResult]:
    return lambda call: echo(call).model_copy(update={"output": text, **fields})


async def record(folder: Path, *turns: Any, **options: Any) -> list[RecordedCall]:
    path, _, _ = await run_traced(folder, ScriptedModel(list(turns)) if turns else None, **options)
    calls, faults = load_calls(path)
    assert faults == []
    return calls


def states(report: ReplayReport) -> list[str]:
    return [one.state for one in report.calls]


async def test_calls_that_give_the_same_are_the_same_whatever_the_clocks(tmp_path: Path) -> None:
    calls = await record(tmp_path, call_echo("a"), call_echo("b"), "done")
    session = FakeSession(lambda call: echo(call).model_copy(update={"clocks": {}}))
    report = await replay(calls, session)
    assert (states(report), report.is_same, session.calls) == (
        ["same", "same"],
        True,
        [("echo", {"text": "a"}), ("echo", {"text": "b"})],
    )


async def test_another_output_is_shown_as_a_difference(tmp_path: Path) -> None:
    calls = await record(tmp_path, call_echo("one\ntwo\nthree"), "done")
    report = await replay(calls, FakeSession(put("one\n2\nthree")))
    [told] = report.calls
    assert (told.state, told.why, report.is_same) == ("different", "the text differs", False)
    assert [line for line in told.diff if line[0] in "+-"] == ["--- recorded", "+++ now", "-two", "+2"]


async def test_another_exit_code_or_error_is_named(tmp_path: Path) -> None:
    calls = await record(tmp_path)
    [code] = (await replay(calls, FakeSession(put("a", metadata={"exit_code": 3})))).calls
    [failed] = (await replay(calls, FakeSession(fail))).calls
    assert code.why == "exit_code was 0 and is 3"
    assert failed.why == (
        "success was true and is false; error_code was none and is TIMEOUT; exit_code was 0 and is none; the text "
        "differs"
    )


async def test_what_is_to_be_ignored_is_the_same_and_nothing_else_is(tmp_path: Path) -> None:
    calls = await record(tmp_path, call_echo("at 12:01 in /tmp/x1: ok"), "done")
    ignore = [re.compile(r"\d\d:\d\d"), re.compile(r"/tmp/\w+")]
    assert (await replay(calls, FakeSession(put("at 13:37 in /tmp/zz: ok")), Comparing(ignore))).is_same
    assert not (await replay(calls, FakeSession(put("at 13:37 in /tmp/zz: bad")), Comparing(ignore))).is_same


async def test_calls_that_were_never_run_are_not_run_now_and_told(tmp_path: Path) -> None:
    calls = await record(tmp_path, Calls([("echo", {"text": "a"}), ("echo", "{broken"), ("nope", {})]), "done")
    session = FakeSession()
    report = await replay(calls, session)
    assert (states(report), len(session.calls), report.is_same) == (["same", "unrun", "unrun"], 1, True)


async def test_functions_of_the_program_were_run_though_nothing_was_sent(tmp_path: Path) -> None:
    assert states(await replay(await record(tmp_path, is_sent=False), FakeSession())) == ["same"]


async def test_a_call_whose_arguments_are_masked_cannot_be_run_and_that_is_no_success(tmp_path: Path) -> None:
    calls = await record(tmp_path, call_echo("the secret-value"), "done", secrets={"k": "secret-value"})
    session = FakeSession()
    report = await replay(calls, session)
    assert (states(report), report.calls[0].why, session.calls, report.is_same) == (
        ["unfit"],
        "secrets in its arguments are masked",
        [],
        False,
    )


async def test_a_secret_in_an_output_is_masked_before_it_is_compared(tmp_path: Path) -> None:
    secrets = {"k": "secret-value"}
    calls = await record(tmp_path, secrets=secrets, answer=put("it is secret-value"))
    report = await replay(calls, FakeSession(put("it is secret-value")), Comparing(masker=Masker(secrets)))
    assert report.is_same
    other = await replay(calls, FakeSession(put("it was secret-value")), Comparing(masker=Masker(secrets)))
    assert "secret-value" not in json.dumps(other.to_json())


async def test_a_call_without_a_result_or_with_parts_missing_cannot_be_compared(tmp_path: Path) -> None:
    path, _, _ = await run_traced(tmp_path, answer=put("x" * 40_000))
    [file.unlink() for file in (path.parent / "blobs").rglob("*") if file.is_file()]
    calls, faults = load_calls(path)
    assert ([call.unfit for call in calls], len(faults)) == (["a large part of its result is missing"], 1)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    calls, _ = load_calls(path)
    assert [call.unfit for call in calls] == ["the trace has no result of it"]


async def test_an_approver_changed_arguments_are_those_that_are_run(tmp_path: Path) -> None:
    path, _, _ = await run_traced(tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    next(line for line in lines if line["type"] == "tool.start")["arguments"] = {"text": "changed"}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    session = FakeSession()
    await replay(load_calls(path)[0], session)
    assert session.calls == [("echo", {"text": "changed"})]


async def test_calls_that_an_earlier_attempt_sent_are_run_though_the_last_one_knew_their_results(
    tmp_path: Path,
) -> None:
    model = [call_echo("a"), call_echo("b"), "done"]
    await run_traced(tmp_path, ScriptedModel([model[0]]), max_iterations=1)
    sent: list[int] = []
    # The run is taken up again: its first result comes out of a log, and only the second call is sent.
    with open_trace(tmp_path, "acme", RUN, masker=Masker()) as trace:

        async def run_call(call: ToolCall) -> ToolResult:
            if call.id != "run1-1-0":
                sent.append(1)
                trace.on_event(CallSent(run=RUN, call=call))
            return echo(call).model_copy(update={"sandbox": None, "clocks": Clocks()})

        await Agent(
            ScriptedModel(model), NativeDialect(), [build_spec("echo")], run_call, on_event=trace, run_id=RUN
        ).run("do it")
    calls, faults = load_calls(trace.path)
    assert (len(sent), [call.unrun for call in calls], faults) == (1, ["", ""], [])


def test_a_long_difference_is_cut_and_says_so() -> None:
    call = RecordedCall("c", "echo", {}, Told("\n".join(map(str, range(500))), True, None, 0))
    told = Comparing().compare(call, put("\n".join(map(str, range(1000, 1500))))(build_call()))
    assert (len(told.diff), "lines of the difference are not shown" in told.diff[-1]) == (MAX_DIFF_LINES + 1, True)


def test_very_long_texts_are_compared_to_their_first_difference() -> None:
    lines = ["same"] * (MAX_COMPARED_LINES + 10)
    call = RecordedCall("c", "echo", {}, Told("\n".join([*lines, "a"]), True, None, 0))
    told = Comparing().compare(call, put("\n".join([*lines, "b"]))(build_call()))
    assert (told.diff[0].startswith(f"the first difference is in line {len(lines) + 1}"), told.diff[1:]) == (
        True,
        ("-a", "+b"),
    )


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("Ran 5 tests in 0.003s", "Ran 5 tests in 1.250s"),
        ("5 passed in 12 ms", "5 passed in 340 ms"),
        ("real\t0m0.001s", "real\t1m12.903s"),
        ("job-1\trunning\t3 s ago\tserve", "job-1\trunning\t11 s ago\tserve"),
        ("started, pid 17", "started, pid 2041"),
        ("[1] 17", "[1] 2041"),
        ("bash: line 1:    17 Killed                  sleep 9", "bash: line 1:  2041 Killed                  sleep 9"),
        ("/tmp/tmp.Z1CaTsW1Fq", "/tmp/tmp.rAQvaVJrHh"),
        ("in /tmp/tmpyee2xpxa/a", "in /tmp/tmpv9z_u6hb/a"),
        (
            "all of it is in /output/command-9d9e840e.txt (7 lines)",
            "all of it is in /output/command-537d3755.txt (7 lines)",
        ),
        ("-rw-r--r-- 1 root root 12 Nov 22 17:40 a.txt", "-rw-r--r-- 1 root root 12 Dec  1 03:02 a.txt"),
    ],
)
async def test_what_differs_each_time_is_the_same_unless_it_is_asked_for(tmp_path: Path, then: str, now: str) -> None:
    calls = await record(tmp_path, call_echo(then), "done")
    [told] = (await replay(calls, FakeSession(put(now)))).calls
    assert (told.state, told.why) == ("same", BUT_FOR)
    [exact] = (await replay(calls, FakeSession(put(now)), Comparing(is_exact=True))).calls
    assert (exact.state, exact.why) == ("different", "the text differs")


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("Ran 5 tests in 0.003s", "Ran 6 tests in 0.003s"),
        ("3 s ago at 5", "3 s ago at 6"),
        ("mean 1.250", "mean 0.003"),
        ("17", "2041"),
        ("process 17 of 20", "process 17 of 21"),
        ("/tmp/tmpfolder/a", "/tmp/tmpother/a"),
        ("/output/command-9d9e840e.txt (7 lines)", "/output/command-9d9e840e.txt (8 lines)"),
        ("-rw-r--r-- 1 root root 12 Nov 22 17:40 a.txt", "-rw-r--r-- 1 root root 13 Nov 22 17:40 a.txt"),
        ("2024-01-01 10:00:00,7", "2024-01-01 10:00:01,7"),
    ],
)
async def test_what_says_something_is_a_difference(tmp_path: Path, then: str, now: str) -> None:
    calls = await record(tmp_path, call_echo(then), "done")
    assert states(await replay(calls, FakeSession(put(now)))) == ["different"]


async def test_which_of_stdout_and_stderr_came_first_says_nothing_but_their_own_order_does(tmp_path: Path) -> None:
    def mixed(text: str, out: str) -> Callable[[ToolCall], ToolResult]:
        return put(text, metadata={"exit_code": 0, "stdout": out, "stderr": "e\n"})

    calls = await record(tmp_path, answer=mixed("a\nb\ne\n", "a\nb\n"))
    for text, out, state in (
        ("e\na\nb\n", "a\nb\n", "same"),
        ("b\na\ne\n", "b\na\n", "different"),
        ("e\na\nc\n", "a\nc\n", "different"),
    ):
        assert states(await replay(calls, FakeSession(mixed(text, out)))) == [state]
    assert states(await replay(calls, FakeSession(mixed("e\na\nb\n", "a\nb\n")), Comparing(is_exact=True))) == [
        "different"
    ]
    assert states(await replay(calls, FakeSession(put("e\na\nb\n")))) == ["different"]


async def test_a_call_finds_what_an_earlier_one_has_left_under_the_name_of_now(tmp_path: Path) -> None:
    then, now = "/output/command-9d9e840e.txt", "/output/command-537d3755.txt"
    calls = await record(tmp_path, call_echo(f"see {then}"), call_echo(f"cat {then} and /tmp/tmp.0123456789"), "done")
    answers = iter([put(f"see {now}"), put("cat it")])
    session = FakeSession(lambda call: next(answers)(call))
    await replay(calls, session)
    assert session.calls[1] == ("echo", {"text": f"cat {now} and /tmp/tmp.0123456789"})


async def test_calls_outside_of_the_sandbox_are_left_alone_and_told(tmp_path: Path) -> None:
    calls, pools = await record(tmp_path), {"echo": "tools"}
    session = FakeSession()
    report = await replay(calls, session, pools=pools)
    assert (states(report), session.calls, report.is_same, report.counts()["outside"]) == (["outside"], [], True, 1)
    assert states(await replay(calls, session, pools=pools, runs_outside=True)) == ["same"]
    assert states(await replay(calls, session, pools={"echo": "sandbox"})) == ["same"]


async def test_a_tool_that_nobody_serves_cannot_be_run(tmp_path: Path) -> None:
    report = await replay(await record(tmp_path), FakeSession(), pools={"other": "sandbox"})
    assert (states(report), report.is_same) == (["unfit"], False)
    assert "start one that does" in report.calls[0].why


def test_of_a_job_in_the_background_it_is_told_why_it_may_differ() -> None:
    call = RecordedCall("c", "bash_tool", {"command": "serve", "background": True}, Told("a", True))
    told = Comparing().compare(call, put("b", metadata={})(build_call()))
    assert (told.state, told.why) == ("different", f"the text differs; {OF_A_JOB}")


def test_of_a_long_line_the_place_of_its_difference_is_shown() -> None:
    call = RecordedCall("c", "echo", {}, Told("x" * 9000 + "one" + "y" * 9000, True, None, 0))
    told = Comparing().compare(call, put("x" * 9000 + "two" + "y" * 9000)(build_call()))
    shown = [line for line in told.diff if line[0] in "+-"][2:]
    assert ["xxxone" in shown[0], "xxxtwo" in shown[1], max(map(len, told.diff)) < 2 * MAX_LINE_CHARS] == [True] * 3
    assert shown[0].endswith("(18003 characters)")


@pytest.mark.parametrize(
    "text",
    [
        "1" * 200_000,
        "/tmp/tmp" * 30_000,
        "pid " * 50_000,
        "-rw-r--r-- 1 a" + " a" * 100_000,
        "1.1" * 60_000,
        "line 1: " * 30_000,
    ],
)
def test_hostile_texts_are_compared_in_little_time(text: str) -> None:
    started = time.process_time()
    without_volatile(text)
    assert time.process_time() - started < 3


# Of others


async def test_a_trajectory_of_another_agent_is_compared_by_its_texts(tmp_path: Path) -> None:
    step = {
        "step_id": 1,
        "source": "agent",
        "message": "",
        "tool_calls": [{"tool_call_id": "x", "function_name": "echo", "arguments": {"text": "a"}}],
        "observation": {"results": [{"source_call_id": "x", "content": "a"}]},
    }
    document = {"schema_version": "ATIF-v1.6", "agent": {"name": "other", "version": "1"}, "steps": [step]}
    path = tmp_path / "other.json"
    path.write_text(json.dumps(document, indent=2))
    calls, _ = load_calls(path)
    assert (await replay(calls, FakeSession())).is_same
    assert not (await replay(calls, FakeSession(put("b")))).is_same


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "no line of a trace"),
        ("hello", "no line of a trace"),
        ('{"schema_version": "ATIF-v1.7"}', "no ATIF trajectory: agent"),
        ("{}", "no line"),
    ],
)
def test_a_file_that_is_neither_is_told(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        load_calls(path)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_calls(tmp_path)
