"""The executor: every call ends with exactly one result and the right code, whatever happens to the call."""

import time
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from structlog.testing import capture_logs

from tests.support.records.builders import build_call, build_context, build_exec_done, build_exec_response, build_spec
from tests.support.records.fakes import FakeSandboxClient, MemoryBlobs, MemoryLedger, build_executor
from toolcrew.contract.calls import KillReport, SandboxInfo, ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.guest_protocol import ExecRequest
from toolcrew.contract.registry import ToolRegistry
from toolcrew.store.blobs import WorkerBlobs
from toolcrew.store.call_records import CallClaim
from toolcrew.store.calls import WorkerCallStore
from toolcrew.store.clock import SharedClock
from toolcrew.workers.executor import CallRepeated
from toolcrew.workers.sandbox_client import GuestResponse
from toolcrew.workers.tools.base import Outcome, ToolEnvironment, WorkerTool

pytestmark = pytest.mark.usefixtures("quiet_logs")

FACTS = {"host": "h1", "queue": "host.h1.b00t"}
KILL = {"signalled": 2, "survivors": 0, "method": "tree", "ms": 5.0}


class Harness:
    """An executor with fakes around it, and one tool `echo` whose handler comes from the test."""

    def __init__(
        self, handler: Any = None, *answers: Any, checks: Any = (), claim: CallClaim | None = None, **spec: Any
    ) -> None:
        self.client = FakeSandboxClient(*answers)
        self.ledger = MemoryLedger(claim)
        self.blobs = MemoryBlobs()
        self.runs = 0

        def run_and_count(arguments: dict[str, Any], bench: ToolEnvironment) -> Outcome:
            self.runs += 1
            return handler(arguments, bench) if handler else Outcome(str(arguments.get("text")))

        tool = WorkerTool(build_spec(**spec), run_and_count, tuple(checks))
        self.executor = build_executor(ToolRegistry([tool]), self.client, self.ledger, self.blobs, FACTS)

    def execute(self, call: ToolCall | None = None, context: ToolContext | None = None) -> ToolResult:
        return self.executor.execute(call or build_call(), context or build_context())


def ask_guest(_: dict[str, Any], bench: ToolEnvironment) -> Outcome:
    bench.run(ExecRequest(argv=["true"], cwd=None, timeout_s=1))
    return Outcome("done")


def test_unknown_tool_is_refused_and_never_starts() -> None:
    harness = Harness()
    result = harness.execute(build_call("nope"))
    assert (result.error_code, result.error) == (ErrorCode.TOOL_NOT_FOUND, "Tool not found: nope")
    assert (harness.ledger.claimed, harness.ledger.refused) == (set(), {("acme", "call-1")})


@pytest.mark.parametrize(
    ("claim", "code", "why"),
    [(CallClaim.EXPIRED, ErrorCode.TIMEOUT, "expired"), (CallClaim.MOVED, ErrorCode.HOST_LOST, "moved")],
)
def test_refused_claim_reports_the_reason(claim: CallClaim, code: ErrorCode, why: str) -> None:
    harness = Harness(claim=claim)
    result = harness.execute()
    assert (result.error_code, result.metadata, harness.runs) == (code, {"not_run": why}, 0)
    assert "was not run" in str(result.error)
    assert harness.ledger.refused == set()


@pytest.mark.parametrize("claim", [CallClaim.STARTED, CallClaim.SUPERSEDED])
def test_repeated_call_is_neither_run_nor_answered(claim: CallClaim) -> None:
    harness = Harness(claim=claim)
    with pytest.raises(CallRepeated) as repeated:
        harness.execute()
    assert (repeated.value.claim, harness.runs) == (claim, 0)


def test_refusal_does_not_replace_the_result_of_a_running_call() -> None:
    """The attacker's aim: repeat a message after its tool was turned off, so that its sender reads that nothing ran."""
    harness = Harness()
    assert harness.execute().success
    with pytest.raises(CallRepeated):
        harness.execute(build_call("nope"))


def test_tool_cannot_report_that_its_call_has_not_run() -> None:
    """A caller that reads this code sends the call again."""
    assert Harness(lambda *_: Outcome("done", {"not_run": "moved", "n": 1})).execute().metadata == {"n": 1}

    def fail(*_: Any) -> Outcome:
        raise ToolFailure(ErrorCode.INTERNAL, "failed", not_run="broker", outcome_lost=True, n=1)

    assert Harness(fail).execute().metadata == {"n": 1}


def test_exception_in_an_argument_check_refuses_the_call() -> None:
    def crash(_: dict[str, Any]) -> str | None:
        raise RuntimeError("a bug")

    harness = Harness(checks=[crash])
    assert (harness.execute().error_code, harness.ledger.refused) == (ErrorCode.INTERNAL, {("acme", "call-1")})


def test_invalid_arguments_are_refused_before_the_claim() -> None:
    harness = Harness(checks=[lambda arguments: "text must not shout" if arguments.get("text") == "HEY" else None])
    refused = harness.execute(build_call(text="HEY"))
    assert (refused.error_code, refused.error) == (ErrorCode.INVALID_ARGUMENTS, "echo: text must not shout")
    assert (harness.runs, harness.ledger.claimed, harness.ledger.refused) == (0, set(), {("acme", "call-1")})


def test_used_aliases_are_reported_also_on_a_failure() -> None:
    def fail(*_: Any) -> Outcome:
        raise ToolFailure(ErrorCode.NO_MATCH, "nothing", near="x")

    result = Harness(fail, aliases={"words": "text"}).execute(build_call(words="a"))
    assert result.metadata == {"near": "x", "aliases_used": ["words -> text"]}


def test_outcome_with_an_error_keeps_its_output() -> None:
    result = Harness(lambda *_: Outcome("half", error="too slow", error_code=ErrorCode.TIMEOUT)).execute()
    assert (result.success, result.output, result.error_code) == (False, "half", ErrorCode.TIMEOUT)


@pytest.mark.parametrize("error", [SandboxUnavailable("sandboxd is gone"), BrokerUnavailable("Redis is gone")])
def test_infrastructure_failure_is_reported_and_logged(error: Exception) -> None:
    with capture_logs() as logs:
        result = Harness(ask_guest, error).execute()
    assert (result.error_code, result.error) == (error.code, str(error))  # type: ignore[attr-defined]
    assert [line["event"] for line in logs] == ["call_not_served"]


def test_exception_in_a_tool_is_logged_without_its_message() -> None:
    def leak(*_: Any) -> Outcome:
        raise RuntimeError("password=hunter2")

    with capture_logs() as logs:
        result = Harness(leak).execute()
    assert (result.error_code, "RuntimeError" in str(result.error)) == (ErrorCode.INTERNAL, True)
    assert "hunter2" not in str(result.error)
    assert [(line["event"], line["log_level"], line["call"]) for line in logs] == [("tool_bug", "error", "call-1")]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_process_exit_exceptions_are_raised_again(stop: type[BaseException]) -> None:
    def end(*_: Any) -> Outcome:
        raise stop

    with pytest.raises(stop):
        Harness(end).execute()


def test_call_without_a_session_fails() -> None:
    result = Harness().execute(context=build_context(session=None))
    assert result.error_code is ErrorCode.SESSION_NOT_FOUND


def test_guest_error_keeps_kill_report_and_sandbox() -> None:
    done = {"error": {"code": "TIMEOUT", "message": "too slow"}, "kill": KILL, "sandbox": {"id": "c0ffee"}}
    result = Harness(ask_guest, GuestResponse(done)).execute()
    assert result.error_code == ErrorCode.TIMEOUT
    assert result.kill == KillReport(**KILL)
    assert result.sandbox == SandboxInfo(id="c0ffee")


@pytest.mark.parametrize(("sent_s", "queued_s"), [(-2.5, 2.5), (30.0, 0.0)])
def test_queue_time_starts_at_sending_and_is_never_negative(sent_s: float, queued_s: float) -> None:
    context = build_context(sent_at=time.time() + sent_s)
    assert Harness().execute(context=context).clocks.queued_s == pytest.approx(queued_s, abs=0.5)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, "files are lost"), ({"workspace_kept": True}, "files in /workspace are kept")],
    ids=["memory", "kept workspace"],
)
def test_lost_sandbox_error_says_if_files_are_kept(fields: dict[str, Any], expected: str) -> None:
    done = {"error": {"code": "SANDBOX_UNAVAILABLE", "message": "it died"}, "sandbox_lost": "the guest went", **fields}
    result = Harness(ask_guest, GuestResponse(done)).execute()
    assert result.error_code is ErrorCode.SANDBOX_UNAVAILABLE
    texts = ("files are lost", "files in /workspace are kept")
    assert [text for text in texts if text in str(result.error)] == [expected]


def test_tool_error_includes_the_loss_of_the_sandbox() -> None:
    def report(_: dict[str, Any], bench: ToolEnvironment) -> Outcome:
        bench.run(ExecRequest(argv=["true"], cwd=None, timeout_s=1))
        return Outcome(error="too slow", error_code=ErrorCode.TIMEOUT)

    result = Harness(report, GuestResponse(build_exec_done(sandbox_lost="the guest went"))).execute()
    assert (result.error_code, "files are lost" in str(result.error)) == (ErrorCode.TIMEOUT, True)


# Content outside the envelope


def test_empty_blob_is_stored() -> None:
    harness = Harness(lambda *_: Outcome(blob=b""))
    assert harness.blobs.kept.get(harness.execute().blob or "none") == b""


def test_missing_blob_stops_the_call_before_it_runs() -> None:
    harness = Harness()
    result = harness.execute(context=build_context(blob="gone"))
    assert (result.error_code, harness.runs) == (ErrorCode.OUTCOME_UNKNOWN, 0)


@pytest.mark.parametrize(
    ("where", "code"),
    [
        ("claim", ErrorCode.BROKER_UNAVAILABLE),
        ("take", ErrorCode.BROKER_UNAVAILABLE),
        ("leave", ErrorCode.OUTCOME_UNKNOWN),
    ],
)
def test_unreachable_redis_gives_the_code_of_its_step(where: str, code: ErrorCode) -> None:
    # A call that has run may have acted: its sender must not read that it may be sent again.
    unreachable = redis.Redis(port=1, socket_connect_timeout=1, retry=Retry(NoBackoff(), 0))
    harness = Harness(lambda *_: Outcome(blob=b"x"))
    ledger: Any = WorkerCallStore(unreachable, "d", SharedClock()) if where == "claim" else harness.ledger
    blobs: Any = harness.blobs if where == "claim" else WorkerBlobs(unreachable, "d", "sandbox")
    executor = build_executor(harness.executor._registry, harness.client, ledger, blobs, FACTS)
    blob = "toolcrew:d:t:acme:blob-sandbox.x" if where == "take" else None
    assert executor.execute(build_call(), build_context(blob=blob)).error_code is code


@pytest.mark.parametrize(
    ("refusal", "code"),
    [(ErrorCode.FILE_TOO_LARGE, ErrorCode.FILE_TOO_LARGE), (ErrorCode.QUOTA_EXCEEDED, ErrorCode.OUTCOME_UNKNOWN)],
)
def test_result_that_cannot_be_stored_keeps_the_kill_report(refusal: ErrorCode, code: ErrorCode) -> None:
    """Callers send a call again that was refused for a limit, and this one has run."""

    def ask(_: dict[str, Any], bench: ToolEnvironment) -> Outcome:
        bench.run(ExecRequest(argv=["true"], cwd=None, timeout_s=1))
        return Outcome(blob=b"x")

    harness = Harness(ask, build_exec_response(kill=KILL))

    def refuse(*_: Any) -> str:
        raise ToolFailure(refusal, "refused")

    harness.blobs.leave = refuse  # type: ignore[method-assign]
    result = harness.execute()
    assert (result.error_code, result.kill) == (code, KillReport(**KILL))


# Hostile guests

INVALID_FIELDS: list[dict[str, Any]] = [
    {"kill": "yes"},
    {"kill": []},
    {"kill": {"signalled": 1}},
    {"kill": {**KILL, "method": "magic"}},
    {"kill": {**KILL, "extra": 1}},
    {"kill": {**KILL, "signalled": -1}},
    {"run_s": "soon"},
    {"run_s": None},
    {"run_s": []},
    {"run_s": 10**400},
    {"sandbox": {"id": 5}},
    {"error": {"code": {}, "message": []}},
    {"error": {"code": "x" * 100_000, "message": "y" * 100_000}},
    {"error": {"message": "half \ud800"}},
    {"sandbox_lost": {"a": 1}},
]


@pytest.mark.parametrize("invalid_fields", INVALID_FIELDS, ids=lambda value: repr(value)[:60])
def test_invalid_guest_fields_give_a_result(invalid_fields: dict[str, Any]) -> None:
    harness = Harness(ask_guest, GuestResponse(build_exec_done(**invalid_fields)))
    with capture_logs() as logs:
        result = harness.execute()
    assert isinstance(result, ToolResult)
    assert harness.runs == 1
    assert {line["event"] for line in logs} <= {"call_not_served"}, "a guest's nonsense is no bug of ours"


@pytest.mark.parametrize(
    "invalid_fields",
    [{"exit_code": "0"}, {"exit_code": 256}, {"streams": {"stdout": None}}, {"oom": 1}, {"streams": {"../evil": {}}}],
    ids=repr,
)
def test_invalid_exec_reply_closes_the_sandbox(invalid_fields: dict[str, Any]) -> None:
    harness = Harness(ask_guest, GuestResponse(build_exec_done(**invalid_fields)))
    assert harness.execute().error_code is ErrorCode.SANDBOX_UNAVAILABLE
    assert harness.client.closed == ["acme:s1"]


def test_guest_text_is_not_in_the_operator_error() -> None:
    result = Harness(ask_guest, GuestResponse(build_exec_done(streams={"call +1 900": {"total": -1}}))).execute()
    assert "900" not in str(result.error)


@pytest.mark.parametrize("run_s", [-5.0, 1e9])
def test_false_guest_run_time_is_bounded(run_s: float) -> None:
    clocks = Harness(ask_guest, build_exec_response(run_s=run_s, sandbox_s=0.75)).execute().clocks
    assert 0 <= clocks.run_s <= 0.75


@pytest.mark.parametrize(
    ("guest_code", "code"),
    [
        ("FILE_NOT_FOUND", ErrorCode.FILE_NOT_FOUND),
        ("NO_SPACE", ErrorCode.NO_SPACE),
        ("NOT_A_REGULAR_FILE", ErrorCode.PATH_NOT_ALLOWED),
        ("SPAWN_FAILED", ErrorCode.FILE_NOT_FOUND),
        ("MADE_UP", ErrorCode.INTERNAL),
        ("HOST_LOST", ErrorCode.INTERNAL),
        ("BROKER_UNAVAILABLE", ErrorCode.INTERNAL),
        ("ENVELOPE_REFUSED", ErrorCode.INTERNAL),
        ("SECURITY_REFUSED", ErrorCode.INTERNAL),
        ("TOOL_NOT_FOUND", ErrorCode.INTERNAL),
        ("__class__", ErrorCode.INTERNAL),
        (None, ErrorCode.INTERNAL),
    ],
)
def test_guest_error_code_is_mapped_or_internal(guest_code: Any, code: ErrorCode) -> None:
    assert (
        Harness(ask_guest, GuestResponse({"error": {"code": guest_code, "message": "x"}})).execute().error_code is code
    )


def test_long_guest_message_is_cut() -> None:
    result = Harness(ask_guest, GuestResponse({"error": {"code": "NO_SPACE", "message": "x" * 1_000_000}})).execute()
    assert len(str(result.error)) <= 4000
