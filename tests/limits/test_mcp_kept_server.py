"""MCP servers over stdio that live as long as a session, or for one call: real processes, good and bad, programs of the
session that connect to the daemon or replace it, and the worker's handling of any output of a sandbox.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from tests.support.guest.guest_exec import LocalSandbox, build_output_response, open_local_sandbox, run_locally
from tests.support.records.builders import build_reply
from tests.support.stack.stack import ROOT, children_of, is_alive
from tests.support.stack.waiting import wait_until
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.guest_protocol import A, GuestReply, GuestRequest
from toolcrew.workers.mcp import sandbox_server
from toolcrew.workers.mcp.answers import build_outcome
from toolcrew.workers.mcp.sandbox_programs import name_driver_socket
from toolcrew.workers.mcp.sandbox_server import SandboxServer
from toolcrew.workers.mcp.settings import StdioEntry

PEER = str(ROOT / "tests" / "support" / "mcp" / "mcp_stdio_peer.py")
END_WAIT_S = 20.0


@pytest.fixture
def box() -> Iterator[LocalSandbox]:
    with open_local_sandbox() as sandbox:
        yield sandbox


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def _server(tmp_path: Path, behaviour: str = "good", **fields: object) -> SandboxServer:
    """Return a server. `tmp_path` makes it unique among tests, because names of sockets are shared on one machine."""
    env = {"OF": SecretStr(str(tmp_path))}
    entry = StdioEntry.model_validate(
        {"command": sys.executable, "args": (PEER, behaviour), "network": "none", "env": env, **fields}
    )
    return SandboxServer("peer", entry, is_sessionless=behaviour != "old")


def _call(
    box: LocalSandbox, server: SandboxServer, tool: str = "echo", timeout_s: float = 30.0, **arguments: str
) -> str:
    result = server.call_tool(box.run, tool, arguments, "/workspace", timeout_s)
    return str(result["content"][0]["text"])


def _count(box: LocalSandbox, server: SandboxServer) -> tuple[int, int]:
    """Return the number of the call within its process, and the process."""
    number, pid = _call(box, server, "count").split()
    return int(number), int(pid)


@dataclass
class _Slow:
    """A call that is running, and is answered once it is `let`."""

    call: "Future[str]"
    fifo: int

    def let(self) -> str:
        os.close(self.fifo)
        return self.call.result(30)

    def failure(self) -> ToolFailure:
        with pytest.raises(ToolFailure) as caught:
            self.call.result(30)
        return caught.value


def _begin(
    threads: ThreadPoolExecutor, box: LocalSandbox, server: SandboxServer, fifo: Path, timeout_s: float = 30.0
) -> _Slow:
    os.mkfifo(fifo)
    call = threads.submit(_call, box, server, timeout_s=timeout_s, text="slow", fifo=str(fifo))
    return _Slow(call, wait_until(lambda: _open_read(fifo), END_WAIT_S, "the server did not begin the call"))


def _open_read(fifo: Path) -> int | None:
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        # No client reads it yet.
        return None


# What a session may expect


@pytest.mark.parametrize("behaviour", ["good", "old"])
def test_later_calls_reuse_the_server_process_and_its_state(box: LocalSandbox, tmp_path: Path, behaviour: str) -> None:
    server = _server(tmp_path, behaviour)
    counts = [_count(box, server) for _ in range(3)]
    assert [number for number, _ in counts] == [1, 2, 3]
    assert len({pid for _, pid in counts}) == 1
    assert box.ops == ["exec", "job_list", "job_start", "exec", "exec", "exec"]


def test_concurrent_calls_are_all_answered(box: LocalSandbox, threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    server = _server(tmp_path)
    texts = ["0", "1", "2", "\u00e9\u0000" * 200_000]
    calls = [threads.submit(_call, box, server, text=text) for text in texts]
    assert [call.result(30) for call in calls] == texts
    assert _count(box, server)[0] == 5
    assert _count(box, _server(tmp_path, cwd="/usr"))[0] == 1, "another entry is another process"


def test_call_does_not_wait_for_a_slow_call(box: LocalSandbox, threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    server = _server(tmp_path, "threads")
    slow = _begin(threads, box, server, tmp_path / "fifo")
    assert _call(box, server, text="quick") == "quick"
    assert not slow.call.done()
    assert slow.let() == "slow"


# How it ends


def test_idle_server_ends_with_its_child_processes(box: LocalSandbox, tmp_path: Path) -> None:
    server = _server(tmp_path, "leaves", idle_s=1)
    _call(box, server, text="x")
    processes = [child for pid in children_of(box.jobs[0].pid) for child in (pid, *children_of(pid))]
    assert len(processes) == 2
    assert box.jobs[0].wait(END_WAIT_S) == 0
    assert not [pid for pid in processes if is_alive(pid)]


@pytest.mark.parametrize(
    ("behaviour", "code", "message"),
    [
        ("dies", ErrorCode.HTTP_ERROR, "exit code 7: out of luck\ufffd[2J"),
        ("floods", ErrorCode.FILE_TOO_LARGE, "sent more than"),
        ("floods_lines", ErrorCode.FILE_TOO_LARGE, "sent more than"),
        ("forges", ErrorCode.HTTP_ERROR, "violates the protocol"),
        ("hangs", ErrorCode.TIMEOUT, "check them before you repeat the call"),
    ],
)
def test_a_bad_call_ends_the_server(
    box: LocalSandbox, tmp_path: Path, behaviour: str, code: ErrorCode, message: str
) -> None:
    server = _server(tmp_path, behaviour)
    before = _count(box, server)[1]
    with pytest.raises(ToolFailure) as caught:
        _call(box, server, timeout_s=3.0 if behaviour == "hangs" else 30.0, text="x")
    assert caught.value.code is code
    assert message in caught.value.message
    number, pid = _count(box, server)
    assert (number, pid != before) == (1, True)


@pytest.mark.parametrize("victim", ["daemon", "server"])
def test_a_call_after_the_server_was_killed_starts_a_new_server(box: LocalSandbox, tmp_path: Path, victim: str) -> None:
    server = _server(tmp_path)
    before = _count(box, server)[1]
    os.kill(box.jobs[0].pid if victim == "daemon" else before, signal.SIGKILL)
    box.jobs[0].wait(END_WAIT_S)
    assert _count(box, server)[0] == 1


@pytest.mark.parametrize(
    ("state", "age_s", "is_killed"), [("running", 60.0, True), ("running", 1.0, False), ("exited", 60.0, False)]
)
def test_old_running_orphan_of_a_server_is_killed(
    box: LocalSandbox, tmp_path: Path, state: str, age_s: float, is_killed: bool
) -> None:
    server = _server(tmp_path)
    box.state, box.age_s, box.labels = state, age_s, ["mine: the MCP server peer"]
    box.jobs.append(subprocess.Popen(["sleep", "60"]))
    _call(box, server, text="x")
    box.jobs[1].kill()
    box.jobs[1].wait(END_WAIT_S)
    _call(box, server, text="x")
    assert box.ops.count("job_kill") == int(is_killed)
    assert box.jobs[0].poll() is None


def test_a_cancelled_call_or_a_timeout_keeps_the_server(
    box: LocalSandbox, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    server = _server(tmp_path, "obeys")
    before = _count(box, server)
    cancelled = _begin(threads, box, server, tmp_path / "fifo")
    box.execs[-1].kill()
    assert cancelled.failure().code is ErrorCode.CANCELLED
    assert _count(box, server) == (3, before[1])
    os.close(cancelled.fifo)
    slow = _begin(threads, box, server, tmp_path / "slow", 3.0)
    assert slow.failure().code is ErrorCode.TIMEOUT
    os.close(slow.fifo)
    assert _count(box, server) == (5, before[1])


def test_a_cancel_that_fails_ends_the_server(box: LocalSandbox, threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    server = _server(tmp_path, "threads")
    before = _count(box, server)
    other = _begin(threads, box, server, tmp_path / "other")
    cancelled = _begin(threads, box, server, tmp_path / "fifo")
    box.execs[-1].kill()
    assert cancelled.failure().code is ErrorCode.CANCELLED
    failure = other.failure()
    assert (failure.code, "another call did not end" in failure.message) == (ErrorCode.HTTP_ERROR, True)
    wait_until(lambda: not is_alive(before[1]), END_WAIT_S, "the server still runs")
    os.close(cancelled.fifo)
    os.close(other.fifo)
    assert _count(box, server)[0] == 1


# Where none can be kept


def test_without_a_free_job_slot_each_call_starts_its_own_server(box: LocalSandbox, tmp_path: Path) -> None:
    box.takes_jobs = False
    assert [_count(box, _server(tmp_path))[0] for _ in range(2)] == [1, 1]


def test_server_without_network_is_refused_in_a_session_with_network(box: LocalSandbox, tmp_path: Path) -> None:
    box.environment["http_proxy"] = "http://127.0.0.1:3128"
    with pytest.raises(ToolFailure) as caught:
        _call(box, _server(tmp_path), text="x")
    assert caught.value.code is ErrorCode.SECURITY_REFUSED
    assert box.jobs[0].wait(END_WAIT_S) == 0
    assert _call(box, _server(tmp_path, network="session"), text="on") == "on"


# Programs of the session


@pytest.mark.parametrize(
    "data",
    [b"", b"+", b"9" * 100, b"1 x\n", b"-1 5\nhello", b"0 0\n", b"9999999999 1\n", b"0 9999999999\n", b"0 2\n{}", b"0 2\n[]", b"0 3\nNaN", b"0 4\n\xff\xff\xff\xff"],
)  # fmt: skip
def test_invalid_data_on_the_daemon_socket_does_not_end_the_server(
    box: LocalSandbox, tmp_path: Path, data: bytes
) -> None:
    server = _server(tmp_path)
    before = _count(box, server)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect("\0" + name_driver_socket(server.entry))
        line.sendall(data)
        assert _count(box, server) == (2, before[1])


def test_idle_connections_to_the_daemon_do_not_block_calls(box: LocalSandbox, tmp_path: Path) -> None:
    server = _server(tmp_path)
    before = _count(box, server)
    connections = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    for line in connections:
        line.connect("\0" + name_driver_socket(server.entry))
    assert _count(box, server) == (2, before[1])
    for line in connections:
        line.close()


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (b"-", None),
        (b"+", ErrorCode.HTTP_ERROR),
        (b'+\n0 {"reply": {}}\n', ErrorCode.HTTP_ERROR),
        (b"+" + b"x" * 9_000_000, ErrorCode.FILE_TOO_LARGE),
    ],
)
def test_program_that_takes_the_daemon_socket_causes_only_failed_calls(
    box: LocalSandbox, threads: ThreadPoolExecutor, tmp_path: Path, reply: bytes, code: ErrorCode | None
) -> None:
    server = _server(tmp_path)
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind("\0" + name_driver_socket(server.entry))
        squatter.listen(64)

        def serve() -> None:
            while True:
                try:
                    line, _ = squatter.accept()
                except OSError:
                    return
                with line:
                    try:
                        line.sendall(reply)
                        while code is not None and not line.recv(65536).endswith(b"}"):
                            pass
                    except OSError:
                        continue

        serving = threads.submit(serve)
        if code is None:
            assert _call(box, server, timeout_s=4.0, text="still") == "still"
        else:
            with pytest.raises(ToolFailure) as caught:
                _call(box, server, text="x")
            assert caught.value.code is code
        squatter.shutdown(socket.SHUT_RDWR)
        serving.result(30)


# One process per call


REFUSING = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"jsonrpc": "2.0", "id": json.loads(line)["id"], "error": {"code": 1, "message": "not today"}}), flush=True)
"""


def _build_one_call_server(behaviour: str = "good", **fields: Any) -> SandboxServer:
    entry = StdioEntry(
        **{"command": sys.executable, "args": (PEER, behaviour), "network": "none", "idle_s": 0, **fields}
    )
    return SandboxServer("peer", entry, is_sessionless=True)


def _call_once(server: SandboxServer, tool: str = "echo", timeout_s: float = 30.0, **arguments: Any) -> str:
    result = server.call_tool(run_locally, tool, arguments, "/workspace", timeout_s)
    return str(result["content"][0]["text"])


# Real processes


@pytest.mark.parametrize(("behaviour", "alone"), [("good", True), ("old", False)])
def test_servers_of_both_protocol_revisions_work(behaviour: str, alone: bool) -> None:
    server = _build_one_call_server(behaviour)
    server.is_sessionless = None
    assert [tool["name"] for tool in server.list_tools(run_locally, 30)] == ["echo", "where", "count"]
    assert server.is_sessionless is alone
    assert _call_once(server, text="h\u00e9 \U0001f600") == "h\u00e9 \U0001f600"


def test_server_that_ignores_the_probe_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_server, "PROBE_S", 1.0)
    server = _build_one_call_server("mute")
    server.is_sessionless = None
    assert len(server.list_tools(run_locally, 30)) == 3
    assert server.is_sessionless is False


def test_a_refused_initialization_is_reported() -> None:
    server = _build_one_call_server("old", args=("-c", REFUSING))
    server.is_sessionless = False
    with pytest.raises(ToolFailure, match=r"refused to begin \(.*not today") as caught:
        _call_once(server, text="x")
    assert caught.value.code is ErrorCode.HTTP_ERROR


def test_server_has_the_configured_environment_and_folder() -> None:
    assert _call_once(_build_one_call_server(env={"LEVEL": SecretStr("7")}, cwd="/usr"), "where") == "/usr 7"


@pytest.mark.parametrize("behaviour", ["shouts", "lies", "asks"])
def test_extra_output_besides_the_reply_is_ignored(behaviour: str) -> None:
    assert _call_once(_build_one_call_server(behaviour), text="still") == "still"


def test_a_missing_program_or_tool_is_reported() -> None:
    with pytest.raises(ToolFailure, match="add the server to the image") as caught:
        _call_once(_build_one_call_server(command="/nonexistent/server"))
    assert caught.value.code is ErrorCode.CONFIG_MISSING
    with pytest.raises(ToolFailure, match="refused tools/call: Unknown tool: echo") as caught:
        _call_once(_build_one_call_server("gone"), text="x")
    assert caught.value.code is ErrorCode.HTTP_ERROR


# What a sandbox may say


@pytest.mark.parametrize(
    "output",
    [b"", b"{", b"[]", b"7", b"{}", b'{"reply": []}', b'{"reply": 7}', b'{"reply": {"jsonrpc": "2.0", "id": 4, "result": {}}}',
     b'{"reply": {"a": 1}}', b'{"failure": 7}', b'{"failure": {"a": []}, "detail": [1]}', b"[" * 100_000],
)  # fmt: skip
def test_invalid_driver_output_is_a_server_failure(output: bytes) -> None:
    def run(request: GuestRequest[A], body: bytes) -> GuestReply[A]:
        noise = b"noise\n" + json.loads(body)["mark"].encode() + b" not at the line's begin"
        return build_reply(request, build_output_response(noise + _framed(body, output)))

    with pytest.raises(ToolFailure) as caught:
        _build_one_call_server().call_tool(run, "echo", {}, "/workspace", 30)
    assert caught.value.code is ErrorCode.HTTP_ERROR


def _framed(body: bytes, output: bytes) -> bytes:
    return b"\n" + json.loads(body)["mark"].encode() + b" " + output + b"\n"


def test_truncated_output_is_never_parsed_as_a_reply() -> None:
    def run(request: GuestRequest[A], body: bytes) -> GuestReply[A]:
        return build_reply(request, build_output_response(_framed(body, b'{"reply": {}}'), total=10**9))

    with pytest.raises(ToolFailure) as caught:
        _build_one_call_server().call_tool(run, "echo", {}, "/workspace", 30)
    assert caught.value.code is ErrorCode.FILE_TOO_LARGE


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda part: (
        st.lists(part)
        | st.dictionaries(st.sampled_from(["type", "text", "content", "data", "isError", "resource", "uri"]), part)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["content", "structuredContent", "isError", "resultType"]), JSON))
def test_any_result_content_is_an_outcome_or_a_server_failure(result: dict[str, Any]) -> None:
    try:
        shown = build_outcome("peer", "mcp__peer__echo", result).output
    except ToolFailure as failure:
        shown = failure.message
    assert shown
    assert "\x1b" not in shown
