"""Grading of items: what counts as a reward, what does not, and what another process does after the death of one."""

import asyncio
import io
import json
import tarfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RedisProcess
from tests.support.runs.grader_harness import Sandboxes, build_tar, with_grader
from tests.support.runs.item_harness import (
    Answer,
    HarnessFactory,
    ItemHarness,
    build_run,
    build_tool_call,
    echo_then,
    fail_with,
    open_harness_factory,
)
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.calls import Clocks, SandboxInfo, ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.run_events import Failure, FailureKind, Grade, RunEnded
from toolcrew.orchestrator.batches.grades import build_item_grade, summarize
from toolcrew.orchestrator.batches.lines import BadBatch, load_lines
from toolcrew.orchestrator.batches.progress import BatchProgress
from toolcrew.orchestrator.batches.report import build_report
from toolcrew.orchestrator.batches.rewards import InvalidReward, parse_reward
from toolcrew.orchestrator.batches.rows import build_row, build_row_line, parse_outcome, parse_row
from toolcrew.orchestrator.runs import grading
from toolcrew.store import run_log


@pytest.fixture
async def make(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HarnessFactory]:
    monkeypatch.setattr(grading, "RETRY_S", 0.001)
    async with open_harness_factory(redis_server) as made:
        yield made


@pytest.mark.parametrize(
    ("code", "reward"), [(0, 1.0), (1, 0.0), (125, 0.0), *((code, None) for code in (126, 127, 137, 255, -9, -15))]
)
async def test_the_exit_status_of_the_grader_is_the_reward(
    make: HarnessFactory, code: int, reward: float | None
) -> None:
    """A command that could not run or was killed gives no reward."""
    harness = make()
    sandboxes = Sandboxes(harness, code)
    outcome = await harness.execute(await harness.put(with_grader(build_tool_call())))
    if reward is None:
        assert outcome.grade is None
        assert outcome.failure is not None
        assert (outcome.failure.kind, outcome.failure.code) == (FailureKind.GRADER, "grader_error")
    else:
        assert outcome.grade is not None
        assert (outcome.grade.reward, outcome.grade.files, outcome.grade.bytes) == (reward, 1, 5)
        assert (outcome.output, outcome.task) == ("out", "t")
    # The agent's session is closed before that of the grader opens.
    assert harness.sent() == [
        *("open", "echo", "end_jobs", "exec", "export", "close"),
        *("open", "exec", "import", "exec", "close"),
    ]
    sessions = [context.session for context in harness.transport.contexts]
    assert sandboxes.graded == [sessions[-1]] != [sessions[0]]
    assert await harness.client.exists("toolcrew:d:t:acme:run.b-1:artifacts") == 0
    with tarfile.open(fileobj=io.BytesIO(sandboxes.imported)) as archive:
        headers = [(entry.name, entry.type, entry.mode, entry.uid) for entry in archive]
    assert headers == [("a.py", tarfile.REGTYPE, 0o644, 0)]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"reward": b"0.5", "code": 1}, FailureKind.GRADER),
        ({"reward": b"0.5", "timed_out": True}, FailureKind.GRADER),
        ({"reward": None}, FailureKind.GRADER),
        ({"reward": b"2"}, FailureKind.GRADER),
        ({"reward": b"0.5", "cancelled": True}, FailureKind.INFRASTRUCTURE),
        ({"reward": b'{"reward": 0.5, "right": 2}'}, None),
    ],
)
async def test_a_reward_file_counts_only_after_a_successful_command(
    make: HarnessFactory, fields: dict[str, Any], kind: FailureKind | None
) -> None:
    harness = make()
    Sandboxes(harness, **fields)
    outcome = await harness.execute(await harness.put(with_grader(build_tool_call(), reward_file="/workspace/reward")))
    assert (outcome.failure.kind if outcome.failure is not None else None) is kind
    assert (outcome.grade.reward if outcome.grade is not None else None) == (None if kind else 0.5)
    if kind is None:
        line = build_row_line(build_row(outcome))
        (parsed,) = parse_outcome(parse_row(line))
        assert (parsed.grade, parsed.task) == (outcome.grade, "t"), "a row has the grade and is read again"
        row = json.loads(line)
        assert (row["task"], row["grade"]["reward"], row["grade"]["scores"]) == ("t", 0.5, {"right": 2.0})


VALID = {
    b"1": 1.0, b"0": 0.0, b" 0.25\n": 0.25, b"1e-3": 0.001, b"1.0": 1.0, b'{"reward": 0.5, "right": 3}': 0.5,
    b'{"reward": 1}': 1.0, b"+1": 1.0, b".5": 0.5, b"1.": 1.0, b"1e0": 1.0, b"1E+00": 1.0, b" 0.5\r\n": 0.5, b"-0": 0.0,
    b"1.0000000000000002": 1.0, b"0.9999999999999999": 1.0, b"-1e-17": 0.0, b"1e-4000": 0.0, b"00.5": 0.5, b'"1"': 1.0,
    b'{"reward": "1"}': 1.0, b'{"reward": 1.0000000000000002, "loss": "-2.5e0"}': 1.0, b"\xef\xbb\xbf0.5": 0.5,
    b"0.1000000000000000055511151231257827021181583404541015625": 0.1, str(sum([0.05] * 20)).encode(): 1.0,
    b'{"reward": 5e-1}': 0.5,
}  # fmt: skip
INVALID = [
    b"", b"NaN", b"nan", b"inf", b"Infinity", b"-1", b"-0.5", b"1.01", b"2", b"1e400", b"1.00001", b"0x1", b"1_0", b"1 1",
    b"true", b"null", b"1,0", b"1/2", b"50%", b".", b"e5", b'"', b'"nan"', b"[1]", b"{}", b'{"reward": true}', b'{"reward": "one"}', b'{"reward": null}', b'{"reward": NaN}',
    b'{"reward": 1e400}', b'{"reward": 1, "reward": 0}', b'{"reward": -1}', b'{"reward": 1, "x": Infinity}', b'{"score": 1}',
    b'{"reward": [1]}', b'{"reward": {"reward": 1}}', b"\xff1", "\uff11".encode(), b"1\x00", b"1" * 70_000, b"1" * 400,
    b"[" * 60_000, b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"reward": 1' + b"0" * 5000 + b"}",
    json.dumps({"reward": 1, **{str(number): 1 for number in range(200)}}).encode(),
]  # fmt: skip


def test_only_a_number_from_0_to_1_is_a_reward() -> None:
    for content, reward in VALID.items():
        assert parse_reward(content)["reward"] == reward
    for content in INVALID:
        with pytest.raises(InvalidReward):
            parse_reward(content)


@pytest.mark.parametrize(
    ("listing", "archive"),
    [
        (b"99999999 1.0 a.py\0", None),
        (b"-1 1.0 a.py\0", None),
        (b"9" * 5000 + b" 1.0 a.py\0", None),
        (b"".join(b"1 1.0 %d.py\0" % number for number in range(2001)), None),
        (b"5 1.0 \xff.py\0", None),
        (b"5 1.0 a\nb.py\0", None),
        (b"5 1.0 ../a.py\0", None),
        (b"5 1.0 /a.py\0", None),
        (b"5 1.0 a//b.py\0", None),
        (b"5 1.0 %s.py\0" % (b"x" * 2000), None),
        (None, b"not a tar"),
        (None, build_tar()),
        (None, build_tar(("b.py", tarfile.REGTYPE, b"x"))),
        (None, build_tar(("../a.py", tarfile.REGTYPE, b"x"))),
        (None, build_tar(("/a.py", tarfile.REGTYPE, b"x"))),
        *((None, build_tar(("a.py", kind, b""))) for kind in (b"1", b"2", b"3", b"4", b"5", b"6")),
        (None, build_tar(("a.py", tarfile.REGTYPE, b"x"), ("a.py", tarfile.REGTYPE, b"y"))),
        (None, build_tar(("a.py", tarfile.REGTYPE, b"x"), ("b.py", tarfile.REGTYPE, b"y"))),
        (None, build_tar(("a.py", tarfile.REGTYPE, b"x" * (grading.MAX_BYTES + 1)))),
        (
            b"1 1 a.py\x001 1 a.py/b.py\0",
            build_tar(("a.py", tarfile.REGTYPE, b""), ("a.py/b.py", tarfile.REGTYPE, b"")),
        ),
    ],
)
async def test_invalid_artifacts_give_the_reward_0(
    make: HarnessFactory, listing: bytes | None, archive: bytes | None
) -> None:
    """The agent's find and tar may print anything. No grader starts."""
    harness = make()
    sandboxes = Sandboxes(harness)
    sandboxes.listing, sandboxes.archive = listing or sandboxes.listing, archive or sandboxes.archive
    outcome = await harness.execute(await harness.put(with_grader(build_tool_call(), artifacts=("**",))))
    assert outcome.grade is not None
    assert (outcome.grade.reward, bool(outcome.grade.refusal), outcome.failure) == (0.0, True, None)
    assert harness.sent().count("open") == 1


async def test_the_artifact_search_runs_in_a_thread_with_a_time_limit(
    make: HarnessFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[int]()

    def search(*_: object) -> None:
        threads.append(threading.get_ident())
        raise ToolFailure(ErrorCode.INVALID_PATTERN, "too slow")

    monkeypatch.setattr(grading, "choose_paths", search)
    harness = make()
    Sandboxes(harness)
    outcome = await harness.execute(await harness.put(with_grader(build_tool_call(), artifacts=("**",))))
    assert outcome.grade is not None
    assert (outcome.grade.reward, outcome.grade.refusal, outcome.failure) == (0.0, "too slow", None)
    assert threads
    assert threading.get_ident() not in threads


def fail_inside(code: ErrorCode) -> Answer:
    """Return the answer of a call that ran in a sandbox and failed there."""
    sandbox, clocks = SandboxInfo(id="s", generation=1, rebuilt=False), Clocks(run_s=120.0)
    return lambda call, _: ToolResult.failed(call, code, "no").model_copy(update={"sandbox": sandbox, "clocks": clocks})


@pytest.mark.parametrize("verb", ["end_jobs", "exec", "export"])
@pytest.mark.parametrize("code", [ErrorCode.TIMEOUT, ErrorCode.INTERNAL])
async def test_a_program_that_fails_in_the_sandbox_of_the_agent_gives_the_reward_0(
    make: HarnessFactory, verb: str, code: ErrorCode
) -> None:
    """The agent may replace `tar` by `sleep`: it must not gain an uncounted sample."""
    harness = make()
    Sandboxes(harness)
    harness.answers[verb] = fail_inside(code)
    outcome = await harness.execute(await harness.put(with_grader(build_tool_call(), artifacts=("**",))))
    assert outcome.grade is not None
    assert (outcome.grade.reward, outcome.grade.refusal, outcome.failure) == (0.0, "no", None)


@pytest.mark.parametrize("code", [ErrorCode.TIMEOUT, ErrorCode.INTERNAL])
async def test_a_copy_that_fails_in_the_sandbox_of_the_grader_is_no_reward(
    make: HarnessFactory, code: ErrorCode
) -> None:
    harness = make()
    Sandboxes(harness)
    harness.answers["import"] = fail_inside(code)
    outcome = await harness.execute(await harness.put(with_grader(build_tool_call(), artifacts=("**",))))
    assert outcome.grade is None
    assert outcome.failure is not None
    assert outcome.failure.kind is FailureKind.INFRASTRUCTURE


@pytest.mark.parametrize("verb", ["exec", "read_file"])
@pytest.mark.parametrize("code", [ErrorCode.TIMEOUT, ErrorCode.INTERNAL])
async def test_a_command_of_the_grader_that_breaks_its_sandbox_is_a_failure_of_the_grader(
    make: HarnessFactory, verb: str, code: ErrorCode
) -> None:
    """Artifacts that the grader runs may stop its guest: that is no reward, and not hidden as a fault of a host."""
    harness = make()
    sandboxes = Sandboxes(harness, reward=b"1")
    usual = sandboxes.exec

    def fail_the_command(call: ToolCall, context: ToolContext) -> ToolResult:
        is_command = "/output/.files-at-start" not in call.arguments["argv"] and call.arguments["argv"][0] == "bash"
        return fail_inside(code)(call, context) if is_command else usual(call, context)

    harness.answers[verb] = fail_the_command if verb == "exec" else fail_inside(code)
    outcome = await harness.execute(await harness.put(with_grader(build_tool_call(), reward_file="/workspace/reward")))
    assert outcome.grade is None
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.code) == (FailureKind.GRADER, "grader_error")
    assert harness.sent().count("open") == 2, "it was not tried again"


OURS = [
    ErrorCode.SANDBOX_UNAVAILABLE, ErrorCode.HOST_LOST, ErrorCode.OUTCOME_UNKNOWN, ErrorCode.ENVELOPE_REFUSED,
    ErrorCode.SESSION_NOT_FOUND, ErrorCode.TIMEOUT, ErrorCode.CANCELLED,
]  # fmt: skip


@pytest.mark.parametrize("verb", ["end_jobs", "exec", "export", "import", "open", "read_file"])
@pytest.mark.parametrize("code", OURS)
async def test_an_infrastructure_failure_is_never_a_reward(make: HarnessFactory, verb: str, code: ErrorCode) -> None:
    harness = make()
    Sandboxes(harness, reward=b"1")
    harness.answers[verb] = fail_with(code)
    outcome = await harness.execute(await harness.put(with_grader(build_tool_call(), reward_file="/workspace/reward")))
    assert outcome.grade is None
    assert outcome.failure is not None
    assert outcome.failure.kind is FailureKind.INFRASTRUCTURE


async def test_grading_is_repeated_when_the_sandbox_is_replaced(make: HarnessFactory) -> None:
    """The file is missing because its sandbox was replaced. The next sandbox stays."""
    harness = make()
    sandboxes = Sandboxes(harness)
    attempts = 0

    def read_file(call: ToolCall, _: ToolContext) -> ToolResult:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            sandboxes.sandbox = SandboxInfo(id="other", generation=2, rebuilt=True)
            return ToolResult.failed(call, ErrorCode.FILE_NOT_FOUND, "no").model_copy(
                update={"sandbox": sandboxes.sandbox}
            )
        return sandboxes.blob(call, b"0.75")

    harness.answers["read_file"] = read_file
    outcome = await harness.execute(await harness.put(with_grader(build_tool_call(), reward_file="/workspace/reward")))
    assert outcome.grade is not None
    assert (outcome.grade.reward, len(set(sandboxes.graded)), harness.sent().count("echo")) == (0.75, 2, 1)


async def test_a_run_that_reached_a_limit_is_graded_and_a_lost_run_is_not(make: HarnessFactory) -> None:
    harness = make(echo_then("unreached", "a"))
    Sandboxes(harness)
    outcome = await harness.execute(await harness.put(with_grader(build_run(limits={"max_iterations": 1}))))
    assert outcome.failure is not None
    assert outcome.grade is not None
    assert (outcome.failure.kind, outcome.grade.reward) == (FailureKind.MODEL, 1.0)
    harness = make(answers={"echo": fail_with(ErrorCode.HOST_LOST)})
    await harness.client.flushall()
    Sandboxes(harness)
    outcome = await harness.execute(await harness.put(with_grader(build_tool_call())))
    assert outcome.grade is None
    assert "end_jobs" not in harness.sent()


async def cancel_when_reached(harness: ItemHarness, claim: Any, reached: asyncio.Event) -> None:
    task = asyncio.create_task(harness.execute(claim))
    async with asyncio.timeout(SOON_S):
        await reached.wait()
    task.cancel()
    await asyncio.wait({task}, timeout=SOON_S)


def hang_at(sandboxes: Sandboxes, argv_end: str, reached: asyncio.Event) -> Answer:
    """Return an exec that hangs at a command."""

    async def answer(call: ToolCall, context: ToolContext) -> ToolResult:
        argv: Any = call.arguments["argv"]
        if argv[-1] == argv_end:
            reached.set()
            await asyncio.Event().wait()
        return sandboxes.exec(call, context)

    return answer


async def test_a_resumed_item_repeats_only_the_grading_in_a_new_session(make: HarnessFactory) -> None:
    reached = asyncio.Event()
    first, second = make(), make(["never"])
    sandboxes = Sandboxes(first)
    first.answers["exec"] = hang_at(sandboxes, "grade", reached)
    resumed_sandboxes = Sandboxes(second, code=1)
    claim = await first.put(with_grader(build_run()))
    await cancel_when_reached(first, claim, reached)
    outcome = await second.execute(await second.claim_by_other(claim))
    assert outcome.grade is not None
    assert outcome.grade.reward == 0.0
    assert outcome.body is not None
    assert (outcome.body["answer"], second.count_model_requests()) == ("done", 0)
    assert second.sent() == ["close", "open", "exec", "import", "exec", "close"]
    session = first.transport.contexts[-1].session
    assert second.transport.contexts[0].session == session != resumed_sandboxes.graded[0]


async def test_the_session_of_an_interrupted_grading_is_closed(make: HarnessFactory) -> None:
    reached = asyncio.Event()
    harness = make()
    sandboxes = Sandboxes(harness)
    harness.answers["exec"] = hang_at(sandboxes, "grade", reached)
    claim = await harness.put(with_grader(build_run()))
    journal = await harness.journal(claim)
    for number in range(20):
        await journal.record_review(f"c{number}", ToolCall(id=f"c{number}", name="echo"))
    await cancel_when_reached(harness, claim, reached)
    closed_sessions: list[str] = []
    original = run_log.SessionStore.close

    async def close(self: Any, tenant: str, session: str) -> None:
        closed_sessions.append(session)
        await original(self, tenant, session)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_log.SessionStore, "close", close)
        await harness.queue.close_sessions("acme", [claim.run])
    assert harness.transport.contexts[-1].session in closed_sessions


async def test_artifacts_changed_in_redis_are_refused(make: HarnessFactory) -> None:
    reached = asyncio.Event()
    first, second = make(), make()
    first.answers["exec"] = hang_at(Sandboxes(first), "grade", reached)
    Sandboxes(second)
    claim = await first.put(with_grader(build_run()))
    await cancel_when_reached(first, claim, reached)
    await first.client.set("toolcrew:d:t:acme:run.b-1:artifacts", build_tar(("a.py", b"0", b"evil")))
    outcome = await second.execute(await second.claim_by_other(claim))
    assert outcome.grade is None
    assert outcome.failure is not None
    assert outcome.failure.kind is FailureKind.INFRASTRUCTURE


def write_lines(folder: Path, *lines: dict[str, Any]) -> Path:
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "in.jsonl"


GRADER = {"command": "true"}


def test_a_line_with_samples_creates_an_item_per_sample(tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    line = {"id": "q", "instruction": "x", "samples": 3, "grader": {**GRADER, "files": "g", "reward_file": "r.json"}}
    items = load_lines(write_lines(tmp_path, line, {"id": "p", "instruction": "y", "samples": 1})).items
    assert [(item.custom_id, item.task, item.line) for item in items] == [
        *((f"q#{number}", "q", 1) for number in (1, 2, 3)),
        ("p", "", 2),
    ]
    grader = items[0].grader
    assert grader is not None
    assert (grader.files, grader.reward_file) == (str(tmp_path / "g"), "/workspace/r.json")


@pytest.mark.parametrize(
    ("lines", "column_text"),
    [
        ([{"id": "q", "instruction": "x", "samples": 0}], "samples"),
        ([{"id": "q", "instruction": "x", "samples": 1001}], "samples"),
        ([{"id": "q#2", "instruction": "x"}, {"id": "q", "instruction": "x", "samples": 2}], "q#2"),
        ([{"id": "q" * 255, "instruction": "x", "samples": 2}], "256"),
        ([{"id": str(n), "instruction": "x", "samples": 1000} for n in range(51)], "50000"),
        ([{"id": "q", "instruction": "x", "grader": {}}], "command"),
        ([{"id": "q", "instruction": "x", "grader": {**GRADER, "files": "missing"}}], "missing"),
        ([{"id": "q", "instruction": "x", "grader": {**GRADER, "artifacts": ["../x"]}}], "'..'"),
        ([{"id": "q", "instruction": "x", "grader": {**GRADER, "reward_file": "/output/artifacts/r"}}], "artifacts"),
        ([{"id": "q", "instruction": "x", "grader": {**GRADER, "reward_file": "../output/artifacts"}}], "artifacts"),
        ([{"id": "q", "instruction": "x", "grader": {**GRADER, "reward_file": "/root/reward"}}], "/workspace"),
        ([{"id": "q", "instruction": "x", "grader": {**GRADER, "timeout_s": 601}}], "600"),
    ],
)
def test_invalid_graders_and_samples_are_refused(tmp_path: Path, lines: list[dict[str, Any]], column_text: str) -> None:
    with pytest.raises(BadBatch) as caught:
        load_lines(write_lines(tmp_path, *lines))
    assert any(column_text in error.message for error in caught.value.errors)


def build_end(item: str, reward: float | None, kind: FailureKind | None = None, **fields: Any) -> RunEnded:
    failure = Failure(kind=kind, code="C", message="m") if kind is not None else None
    grade = Grade(reward=reward) if reward is not None else None
    task = item.partition("#")[0]
    return RunEnded(run=item, item=item, state="x", failure=failure, grade=grade, task=task, **fields)


def test_infrastructure_failures_do_not_count_in_the_pass_rates() -> None:
    ends = [
        *(build_end(f"a#{number}", 1.0, cost=0.5) for number in range(3)),
        build_end("a#3", 0.5, FailureKind.MODEL),
        build_end("b#0", None, FailureKind.GRADER),
        build_end("b#1", None, FailureKind.MODEL),
        *(build_end(f"b#{4 + number}", None, kind) for number, kind in enumerate((FailureKind.INFRASTRUCTURE,) * 3)),
        build_end("c#0", None, FailureKind.CANCELLED),
        build_end("c#1", None, FailureKind.INPUT),
    ]
    summary = summarize(filter(None, map(build_item_grade, ends)))
    assert summary is not None
    assert (summary.tasks, summary.counted, summary.solved, summary.grader_errors) == (3, 6, 3, 1)
    assert (summary.infrastructure, summary.cancelled, summary.input) == (3, 1, 1)
    assert summary.mean_reward == pytest.approx(3.5 / 4)
    assert [(rate.k, rate.tasks, rate.rate) for rate in summary.passes] == [
        (1, 2, pytest.approx(0.375)),
        (2, 2, pytest.approx(0.5)),
        (4, 1, pytest.approx(1.0)),
    ]
    assert summary.cost_per_solved == pytest.approx(0.5)
    assert summarize([]) is None


def test_event_order_and_repetition_do_not_change_the_grade_summary() -> None:
    ends = [build_end(f"a#{number}", float(number % 2)) for number in range(6)]
    first, second = BatchProgress(6), BatchProgress(6)
    for event in ends:
        first.add(event)
    for event in [*reversed(ends), *ends]:
        second.add(event)
    assert first.summarize_grades() == second.summarize_grades() is not None
    page = build_report(ends, title="t")
    assert "pass@1" in page
    assert "pass@1" not in build_report([build_end("", None)], title="t")


async def test_declared_artifacts_that_are_no_files_are_named_in_the_grade(make: HarnessFactory) -> None:
    harness = make()
    sandboxes = Sandboxes(harness)
    sandboxes.listing += b"p 1.0 pipe.py\0s 1.0 sock.py\0l 1.0 li\nnk.py\0c 1.0 other.txt\0"
    item = with_grader(build_run(), artifacts=("*.py", "none.md"))
    outcome = await harness.execute(await harness.put(item))
    assert outcome.grade is not None
    assert (outcome.grade.reward, outcome.grade.files) == (1.0, 1)
    named = [[name for name in ("pipe", "sock", "nk.py", "none.md") if name in text] for text in outcome.grade.missing]
    assert sorted(named) == [["nk.py"], ["none.md"], ["pipe"], ["sock"]]
    assert all(text.isprintable() for text in outcome.grade.missing)
