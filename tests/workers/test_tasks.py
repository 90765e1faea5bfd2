"""The Celery edge, the blobs and the session verbs: only signed calls of the right task run, once."""

import json
from typing import Any

import pytest
import redis
import redis.asyncio
from celery import Celery
from celery.exceptions import Ignore
from redis.backoff import NoBackoff
from redis.retry import Retry
from structlog.testing import capture_logs

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_call, build_context, build_exec_response, build_spec
from tests.support.records.fakes import FakeSandboxClient, MemoryBlobs, MemoryLedger, build_executor
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.envelope import decode_result, encode_call
from toolcrew.contract.errors import OPERATOR_CODES, EnvelopeRefused, ErrorCode, ToolFailure
from toolcrew.contract.names import task_name
from toolcrew.contract.registry import ToolRegistry
from toolcrew.contract.signing import ResultSeal
from toolcrew.store import blobs as blobs_module
from toolcrew.store.blobs import Blobs as OrchestratorBlobs
from toolcrew.store.blobs import WorkerBlobs
from toolcrew.store.metrics import RefusalCounter
from toolcrew.store.usage import StoredChange
from toolcrew.workers.celery_edge.tasks import CallNotServed, register_tasks
from toolcrew.workers.executor import Executor
from toolcrew.workers.sandbox_client import GuestResponse, SandboxdUnreachable
from toolcrew.workers.tools.base import Outcome, WorkerRegistry, WorkerTool
from toolcrew.workers.tools.builtin import build_registry

REGISTRY = build_registry()


class Edge:
    """The tasks of a worker, called as Celery calls them."""

    def __init__(self) -> None:
        self.client = FakeSandboxClient()
        self.built = 0
        self.refused: list[str] = []
        self._app = Celery("test", broker="memory://", set_as_current=False)
        register_tasks(self._app, REGISTRY, KEY, self._build, self.refused.append, "d")

    def _build(self) -> Executor:
        self.built += 1
        return build_executor(REGISTRY, self.client, MemoryLedger(), MemoryBlobs(), {"host": "h", "queue": "q"})

    def run(self, task: str, envelope: Any) -> ToolResult:
        return decode_result(
            json.loads(json.dumps(self._app.tasks[task].run(envelope=envelope).encoded)), ResultSeal(KEY, "acme")
        )

    def names(self) -> set[str]:
        return {name for name in self._app.tasks if not name.startswith("celery.")}


@pytest.fixture(scope="module")
def one_edge() -> Edge:
    """Share one edge between all tests, because registering takes a while."""
    edge = Edge()
    assert edge.names()
    return edge


@pytest.fixture
def edge(one_edge: Edge) -> Edge:
    one_edge.client.closed.clear()
    one_edge.refused.clear()
    return one_edge


def test_tasks_are_registered_only_with_the_own_app(edge: Edge) -> None:
    other = Celery("other", broker="memory://", set_as_current=False)
    assert edge.names() & set(other.tasks) == set()


def test_envelope_for_another_tool_than_its_task_is_refused(edge: Edge) -> None:
    with pytest.raises(EnvelopeRefused, match="another tool"):
        edge.run("tool.read_tool", encode_call(build_call("session.close"), build_context(), KEY))
    assert (edge.client.closed, edge.refused) == ([], ["wrong_task"])


@pytest.mark.parametrize("envelope", [None, 5, b"{}", {}, [], "", "{", "null", '{"v": 1}'], ids=repr)
def test_malformed_envelope_is_refused(edge: Edge, envelope: Any) -> None:
    with pytest.raises(EnvelopeRefused):
        edge.run("session.close", envelope)
    assert edge.client.closed == []
    assert edge.refused in (["malformed"], ["version"])


def test_repeated_call_stores_no_result_and_is_counted(edge: Edge) -> None:
    envelope = encode_call(build_call("session.close", call_id="twice"), build_context(), KEY)
    edge.run("session.close", envelope)
    with capture_logs(), pytest.raises(Ignore):
        edge.run("session.close", envelope)
    assert (edge.client.closed, edge.refused) == (["acme:s1"], ["repeated"])


def build_app(name: str, handler: Any, **spec: Any) -> Celery:
    """Return an app whose only tool has that handler."""
    registry: WorkerRegistry = ToolRegistry([WorkerTool(build_spec(name, **spec), handler)])
    app = Celery("test", broker="memory://", set_as_current=False)

    def build() -> Executor:
        return build_executor(registry, FakeSandboxClient(), MemoryLedger(), MemoryBlobs(), {"host": "h", "queue": "q"})

    register_tasks(app, registry, KEY, build, lambda _: None, "d")
    return app


@pytest.mark.parametrize("code", ErrorCode)
def test_task_fails_only_for_operator_error_codes(code: ErrorCode) -> None:
    def fail(arguments: dict[str, Any], bench: Any) -> Outcome:
        raise ToolFailure(code, "the words of a secret")

    task = build_app("x", fail).tasks[task_name("x")]
    envelope = encode_call(build_call("x"), build_context(), KEY)
    if code not in OPERATOR_CODES:
        answer = task.run(envelope=envelope)
    else:
        with capture_logs(), pytest.raises(CallNotServed) as failed:
            task.run(envelope=envelope)
        assert (code in str(failed.value), "secret" in str(failed.value)) == (True, False)
        answer = failed.value.answer
    result = decode_result(json.loads(json.dumps(answer.encoded)), ResultSeal(KEY, "acme"))
    assert (result.error_code, result.error) == (code, "the words of a secret")


# Counts and blobs on a real Redis


@pytest.mark.parametrize(
    ("name", "attempt", "outcome", "stored"),
    [
        ("session.checkpoint", 1, Outcome(metadata={"checkpoint": "k", "bytes": 10}), StoredChange("k", 10)),
        ("session.delete_checkpoint", 1, Outcome(metadata={"deleted": True}), StoredChange("k", None)),
        ("session.delete_checkpoint", 1, Outcome(metadata={"deleted": False}), None),
        ("session.delete_checkpoint", 2, Outcome(metadata={"deleted": False}), StoredChange("k", None)),
        ("session.delete_checkpoint", 1, Outcome(error="no", error_code=ErrorCode.FILE_NOT_FOUND), None),
        ("x", 1, Outcome(metadata={"bytes": 10}), None),
    ],
)
def test_stored_files_of_calls_are_recorded(
    name: str, attempt: int, outcome: Outcome, stored: StoredChange | None
) -> None:
    app, call = build_app(name, lambda arguments, bench: outcome), build_call(name)
    if name == "session.delete_checkpoint":
        parameter = {"checkpoint": {"type": "string"}}
        app = build_app(name, lambda arguments, bench: outcome, properties=parameter, idempotent=True)
        call = build_call(name, checkpoint="k")
    answer = app.tasks[task_name(name)].run(envelope=encode_call(call, build_context(attempt=attempt), KEY))
    assert answer.ending.stored == stored


@pytest.mark.parametrize("was_sent", [True, False])
def test_unrun_call_leaves_its_record_open(was_sent: bool) -> None:
    def fail(arguments: dict[str, Any], bench: Any) -> Outcome:
        raise SandboxdUnreachable("away", was_sent=was_sent)

    with capture_logs():
        try:
            answer = (
                build_app("x", fail)
                .tasks[task_name("x")]
                .run(envelope=encode_call(build_call("x"), build_context(), KEY))
            )
        except CallNotServed as failed:
            answer = failed.answer
    assert (answer.ending is not None) is was_sent


def test_failed_refusal_count_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    unreachable = redis.Redis(port=1, socket_connect_timeout=1, retry=Retry(NoBackoff(), 0))
    RefusalCounter(unreachable, "d").count("signature")
    assert ["refusal_not_counted" in record.getMessage() for record in caplog.records] == [True]


def test_blob_can_be_read_until_it_is_deleted(redis_server: RedisProcess) -> None:
    """A call that is lost with its worker is sent again with the same content."""
    with redis_server.client() as client:
        blobs = WorkerBlobs(client, "d", "sandbox")
        key = blobs.leave("acme", b"\x00\xff")
        assert 0 < client.ttl(key) <= 600
        assert blobs.take("acme", key) == b"\x00\xff"
        assert blobs.take("acme", key) == b"\x00\xff"
        client.delete(key)
        with pytest.raises(ToolFailure) as failure:
            blobs.take("acme", key)
        assert failure.value.code is ErrorCode.OUTCOME_UNKNOWN


@pytest.mark.parametrize("kind", ["another tenant's", "another pool's", "no blob"])
def test_blob_key_of_another_owner_is_refused(redis_server: RedisProcess, kind: str) -> None:
    with redis_server.client() as client:
        blobs, web = WorkerBlobs(client, "d", "sandbox"), WorkerBlobs(client, "d", "web")
        client.set("toolcrew:d:catalog", "x")
        keys = {"another tenant's": blobs.leave("rival", b"x"), "another pool's": web.leave("acme", b"x")}
        with pytest.raises(ToolFailure) as refused:
            blobs.take("acme", keys.get(kind, "toolcrew:d:catalog"))
        assert refused.value.code is ErrorCode.PERMISSION_DENIED
        assert blobs.take("rival", keys["another tenant's"]) == b"x"
        assert (client.get("toolcrew:d:catalog"), web.take("acme", keys["another pool's"])) == (b"x", b"x")


def test_changed_blob_is_refused_by_the_worker(redis_server: RedisProcess) -> None:
    with redis_server.client() as client:
        blobs = WorkerBlobs(client, "d", "sandbox")
        key, other = blobs.leave("acme", b"content"), blobs.leave("acme", b"other")
        for forged in (b"hostile", b"", client.get(other)):
            client.set(key, forged)
            with pytest.raises(ToolFailure, match="another program has written to Redis") as refused:
                blobs.take("acme", key)
            assert refused.value.code is ErrorCode.ENVELOPE_REFUSED


async def test_changed_blob_is_refused_by_the_orchestrator(redis_server: RedisProcess) -> None:
    async with redis.asyncio.Redis.from_url(redis_server.url) as client:
        blobs = OrchestratorBlobs(client, "d")
        key = await blobs.leave("acme", b"content")
        await client.set(key, b"hostile")
        with pytest.raises(ToolFailure) as refused:
            await blobs.take("acme", key)
        assert refused.value.code is ErrorCode.ENVELOPE_REFUSED
        await client.set(key, b"content")
        assert await blobs.take("acme", key) == b"content"


def test_blob_size_is_limited(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs_module, "MAX_BLOB_BYTES", 10)
    with redis_server.client() as client:
        blobs = WorkerBlobs(client, "d", "sandbox")
        assert blobs.take("acme", blobs.leave("acme", bytes(10))) == bytes(10)
        with pytest.raises(ToolFailure) as refused:
            blobs.leave("acme", bytes(11))
        assert refused.value.code is ErrorCode.FILE_TOO_LARGE


KILL = {"signalled": 3, "survivors": 0, "method": "tree", "ms": 5.0}
FACTS = {"host": "h1", "queue": "host.h1.b00t"}


class Bench:
    """The built-in tools over a scripted guest."""

    def __init__(self, *answers: Any, content: bytes = b"", **context: Any) -> None:
        self.client = FakeSandboxClient(*answers)
        self.blobs = MemoryBlobs()
        if content:
            context["blob"] = self.blobs.leave("acme", content)
        self.context = build_context(**context)
        self.executor = build_executor(REGISTRY, self.client, MemoryLedger(), self.blobs, FACTS)

    def run(self, tool: str, **arguments: Any) -> ToolResult:
        return self.executor.execute(ToolCall(id="call-1", name=tool, arguments=arguments), self.context)

    def write(self, **arguments: Any) -> ToolResult:
        return self.run("write_tool", **{"content": "", **arguments})

    @property
    def request(self) -> dict[str, Any]:
        return self.client.requests[-1]


# Session verbs


@pytest.mark.parametrize(
    "invalid",
    [{"restore": "../x"}, {"restore": ""}, {"network": "host"}, {"ttl_s": 0}, {"ttl_s": -1}, {"ttl_s": 86401}],
    ids=str,
)
def test_invalid_session_open_options_are_refused(invalid: dict[str, Any]) -> None:
    bench = Bench()
    assert bench.run("session.open", **invalid).error_code is ErrorCode.INVALID_ARGUMENTS
    assert bench.client.requests == []


def test_session_cancel_is_not_a_queued_call() -> None:
    assert Bench().run("session.cancel", call_id="c9").error_code is ErrorCode.TOOL_NOT_FOUND


def test_exec_returns_both_streams_in_one_blob() -> None:
    bench = Bench(build_exec_response(b"out", b"error", merged=b"", exit_code=2), content=b"in")
    result = bench.run("session.exec", argv=["cat", "-"], env={"A": "b"}, cwd="/tmp")
    assert bench.blobs.kept[str(result.blob)] == b"outerror"
    assert (result.metadata["returncode"], result.metadata["stdout_bytes"]) == (2, 3)
    assert bench.client.bodies == [b"in"]
    assert {name: bench.request[name] for name in ("argv", "env", "cwd", "script_bytes")} == {
        "argv": ["cat", "-"],
        "env": {"A": "b"},
        "cwd": "/tmp",
        "script_bytes": 0,
    }


@pytest.mark.parametrize(("fields", "code"), [({"signal": 15}, -15), ({"signal": None}, -9)])
def test_exec_of_a_killed_program_returns_the_signal(fields: dict[str, Any], code: int) -> None:
    result = Bench(build_exec_response(exit_code=None, timed_out=True, kill=KILL, **fields)).run(
        "session.exec", argv=["x"]
    )
    assert (result.success, result.metadata["returncode"], result.metadata["timed_out"]) == (True, code, True)


@pytest.mark.parametrize(
    ("fields", "stderr", "code"),
    [
        ({"timed_out": True, "exit_code": None}, b"", ErrorCode.TIMEOUT),
        ({"cancelled": True, "exit_code": None, "signal": 9}, b"", ErrorCode.CANCELLED),
        ({"exit_code": 2}, b"tar: a: No space left on device", ErrorCode.NO_SPACE),
        ({"exit_code": 2}, b"tar: this does not look like a tar archive", ErrorCode.INVALID_ARGUMENTS),
        ({"exit_code": None, "signal": 15}, b"tar: a: No space left on device", ErrorCode.NO_SPACE),
        ({"exit_code": 2}, b"tar: ../x: Member name contains '..'", ErrorCode.PATH_NOT_ALLOWED),
        ({"exit_code": 0}, b"tar: Removing leading `/' from member names", ErrorCode.PATH_NOT_ALLOWED),
    ],
)
def test_failed_import_has_the_code_of_its_cause(fields: dict[str, Any], stderr: bytes, code: ErrorCode) -> None:
    assert Bench(build_exec_response(b"", stderr, **fields), content=b"x").run("session.import").error_code is code


def test_cancelled_export_is_reported() -> None:
    assert (
        Bench(build_exec_response(b"ta", cancelled=True, exit_code=None, signal=9)).run("session.export").error_code
        is ErrorCode.CANCELLED
    )


def test_oversized_export_is_an_error() -> None:
    counts = {"stdout": {"total": 99, "head": 3, "tail": 0}, "stderr": {"total": 0, "head": 0, "tail": 0}}
    result = Bench(build_exec_response(b"tar", streams=counts)).run("session.export")
    assert (result.error_code, result.blob) == (ErrorCode.FILE_TOO_LARGE, None)


def answer(text: bytes = b"", **fields: Any) -> GuestResponse:
    done = {"created": True, "size": 4, "mode_bits": 0o644, "written": 4, "lines": 2, "encoding": "utf-8"}
    return GuestResponse({**done, **fields}, {"file": text})


@pytest.mark.parametrize(
    "arguments",
    [{"mode": "w"}, {"encoding": ""}, {"content": "\ud800"}, {"content": 5}, {"file_path": ""}, {"text": "x"}],
)
def test_invalid_write_arguments_are_refused_before_sending(arguments: dict[str, Any]) -> None:
    bench = Bench()
    assert bench.write(**{"file_path": "a", **arguments}).error_code is ErrorCode.INVALID_ARGUMENTS
    assert bench.client.requests == []


@pytest.mark.parametrize("fields", [{"lines": "2"}, {"written": -1}, {"encoding": "x\ny"}, {"encoding": None}])
def test_invalid_write_reply_closes_the_sandbox(fields: dict[str, Any]) -> None:
    bench = Bench(answer(**fields))
    assert bench.write(file_path="a").error_code is ErrorCode.SANDBOX_UNAVAILABLE
    assert bench.client.closed == ["acme:s1"]


def test_write_failure_reports_valid_size_and_lines() -> None:
    error = {"code": "FILE_TOO_LARGE", "message": "a: too large", "size": 9, "lines": 3, "other": 1}
    assert Bench(GuestResponse({"error": error})).write(file_path="a").metadata == {"size_bytes": 9, "lines": 3}
    for invalid in (-1, True, 2**70):
        assert Bench(GuestResponse({"error": {**error, "size": invalid}})).write(file_path="a").metadata == {"lines": 3}


def test_path_with_control_characters_is_shown_on_one_line() -> None:
    assert str(Bench(answer()).write(file_path="a\n\udcff").output).startswith("created a\ufffd? (")
