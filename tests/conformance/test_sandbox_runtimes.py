"""The contract of every sandbox runtime (workers/sandboxd/runtime/base.py), on real sandboxes of a real engine."""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.support.guest.stream_client import StreamClient
from tests.support.sandboxd.containerd_server import ContainerdServer, open_containerd
from tests.support.sandboxd.containers import IMAGE, Watched, open_engine, watch
from tests.support.stack.processes import read_proc
from tests.support.stack.stack import is_alive
from tests.support.stack.waiting import SOON_S, wait_until, wait_until_async
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.guest_protocol import (
    REQUESTS,
    EditTextRequest,
    ExecRequest,
    FailedAnswer,
    GlobRequest,
    GrepRequest,
    GuestAnswer,
    GuestRequest,
    JobInputRequest,
    JobKillRequest,
    JobListRequest,
    JobPollRequest,
    JobStartRequest,
    ReadFileRequest,
    ReadTextRequest,
    WriteFileRequest,
    WriteTextRequest,
    parse_guest_answer,
)
from toolcrew.workers.sandboxd.frames import Frame, GuestChannel
from toolcrew.workers.sandboxd.runtime.apparmor import ProfileChoice
from toolcrew.workers.sandboxd.runtime.base import (
    LABEL_CREATED_AT,
    LABEL_DEPLOYMENT,
    LABEL_PRODUCT,
    PRODUCT,
    AttachedContainer,
    SandboxRuntime,
)
from toolcrew.workers.sandboxd.runtime.containerd_engine import ContainerdEngine
from toolcrew.workers.sandboxd.runtime.engine import Engine
from toolcrew.workers.sandboxd.runtime.engine_runtime import EngineRuntime
from toolcrew.workers.sandboxd.runtime.engines import ContainerEngine
from toolcrew.workers.sandboxd.runtime.hardening import SandboxLimits, SandboxSpec
from toolcrew.workers.sandboxd.runtime.oci import OciRuntime, find_obstacle
from toolcrew.workers.sandboxd.runtime.seccomp import load_seccomp_profile

pytestmark = pytest.mark.stack

PROGRAMS = {"engine": None, "crun": "crun", "runc": "runc", "containerd": "crun"}
"""Kind of host -> OCI runtime. With `containerd`, sandboxes are on the images of a containerd without Docker."""


@dataclass
class Host:
    """A runtime with a specification that it can start."""

    runtime: SandboxRuntime
    spec: SandboxSpec
    deployment: str

    def name(self) -> str:
        return f"toolcrew-{self.deployment}-{secrets.token_hex(8)}"


@pytest.fixture(scope="module")
def containerd() -> Iterator[ContainerdServer]:
    with open_containerd(open_engine()) as opened:
        yield opened
        assert opened.leases() == opened.views() == []


@pytest.fixture(params=PROGRAMS)
async def host(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Host]:
    open_engine()
    program = PROGRAMS[request.param]
    if program is not None and shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    deployment = f"conformance-{secrets.token_hex(4)}"
    with closing(_open(request, tmp_path)) as engine:
        facts = await engine.facts()
        labels = {LABEL_PRODUCT: PRODUCT, LABEL_DEPLOYMENT: deployment, LABEL_CREATED_AT: "1700000000"}
        spec = SandboxSpec(
            IMAGE,
            "runc",
            SandboxLimits(),
            labels,
            load_seccomp_profile(),
            facts.cgroup_version,
            guest_volume=await engine.ensure_guest_volume(IMAGE),
            image_facts=await engine.find_image(IMAGE),
        )
        if program is None:
            assert isinstance(engine, Engine)
            yield Host(EngineRuntime(engine), spec, deployment)
            return
        assert find_obstacle(facts) is None
        runtime = OciRuntime(engine, str(shutil.which(program)), facts)
        try:
            yield Host(runtime, spec, deployment)
        finally:
            for container in await runtime.list_sandboxes(deployment):
                await runtime.remove(container.id)
            await runtime.close()


def _open(request: pytest.FixtureRequest, folder: Path) -> ContainerEngine:
    if request.param != "containerd":
        return Engine()
    return ContainerdEngine(request.getfixturevalue("containerd").address, folder)


@dataclass
class Started:
    """A sandbox whose guest has answered."""

    name: str
    id: str
    frames: "asyncio.Queue[Frame]"
    channel: GuestChannel
    watched: Watched
    lost: "asyncio.Future[str]"


@contextlib.asynccontextmanager
async def started(host: Host, spec: SandboxSpec | None = None) -> AsyncIterator[Started]:
    """Start a sandbox, wait for its guest, and remove it on exit."""
    name, frames, lost = host.name(), asyncio.Queue[Frame](), asyncio.get_running_loop().create_future()
    container: AttachedContainer = await host.runtime.start(spec or host.spec, name)
    channel = await GuestChannel.open(container.sock, frames.put_nowait, lost.set_result, container.stderr)
    try:
        hello = await asyncio.wait_for(frames.get(), SOON_S)
        assert hello.header["ev"] == "hello"
        yield Started(name, container.id, frames, channel, watch(open_engine(), container.id), lost)
    finally:
        channel.close()
        await host.runtime.remove(container.id)


async def test_a_sandbox_answers_a_ping_and_has_no_process_after_removal(host: Host) -> None:
    async with started(host) as sandbox:
        sandbox.channel.send({"op": "ping", "id": secrets.token_hex(16)})
        answer = await asyncio.wait_for(sandbox.frames.get(), SOON_S)
        assert answer.header["ev"] == "pong"
        pids = sandbox.watched.processes()
    assert not [pid for pid in pids if is_alive(pid)]
    assert await host.runtime.list_sandboxes(host.deployment) == []


async def test_a_running_sandbox_has_no_drift_from_its_profile(host: Host) -> None:
    async with started(host) as sandbox:
        assert await host.runtime.find_drift(sandbox.id, host.spec) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: replace(spec, limits=replace(spec.limits, pids=spec.limits.pids + 1)),
        lambda spec: replace(spec, limits=replace(spec.limits, memory_reserve_bytes=1 << 30)),
        lambda spec: replace(spec, limits=replace(spec.limits, cpus=2.0)),
        lambda spec: replace(spec, limits=replace(spec.limits, nofile=4096)),
        lambda spec: replace(spec, limits=replace(spec.limits, tmp_inodes=99)),
        lambda spec: replace(spec, network="egress"),
        lambda spec: replace(spec, life_s=1.0),
    ],
    ids=["pids", "memory", "cpus", "descriptors", "inodes", "variables", "command"],
)
async def test_a_property_that_differs_is_reported_as_drift(
    host: Host, change: Callable[[SandboxSpec], SandboxSpec]
) -> None:
    async with started(host) as sandbox:
        assert await host.runtime.find_drift(sandbox.id, change(host.spec)) != []


async def test_a_sandbox_without_its_apparmor_profile_has_drift(host: Host) -> None:
    if not isinstance(host.runtime, OciRuntime):
        pytest.skip("the engine chooses the profile")
    async with started(host) as sandbox:
        host.runtime.apparmor = ProfileChoice("another-profile")
        assert len(await host.runtime.find_drift(sandbox.id, host.spec)) == 1


async def test_a_sandbox_is_listed_with_its_labels_in_its_own_deployment_only(host: Host) -> None:
    async with started(host) as sandbox:
        [listed] = await host.runtime.list_sandboxes(host.deployment)
        assert (listed.id, listed.name, listed.state) == (sandbox.id, sandbox.name, "running")
        assert host.spec.labels.items() <= listed.labels.items()
        assert await host.runtime.list_sandboxes(f"{host.deployment}-other") == []


async def test_a_paused_sandbox_answers_after_unpause(host: Host) -> None:
    async with started(host) as sandbox:
        for _ in range(2):
            await host.runtime.pause(sandbox.id)
        assert sandbox.watched.is_frozen()
        sandbox.channel.send({"op": "ping", "id": secrets.token_hex(16)})
        for _ in range(2):
            await host.runtime.unpause(sandbox.id)
        assert not sandbox.watched.is_frozen()
        assert (await asyncio.wait_for(sandbox.frames.get(), SOON_S)).header["ev"] == "pong"


async def test_a_paused_sandbox_can_be_removed(host: Host) -> None:
    async with started(host) as sandbox:
        await host.runtime.pause(sandbox.id)
        pids = sandbox.watched.processes()
        await host.runtime.remove(sandbox.name)
        assert not [pid for pid in pids if is_alive(pid)]


async def test_concurrent_and_repeated_removals_succeed(host: Host) -> None:
    async with started(host) as sandbox:
        await asyncio.gather(*(host.runtime.remove(sandbox.id) for _ in range(3)))
    await host.runtime.remove(sandbox.name)
    await host.runtime.remove(host.name())


@pytest.mark.parametrize("operation", ["pause", "unpause"])
async def test_pausing_a_sandbox_that_does_not_exist_fails(host: Host, operation: str) -> None:
    method: Callable[[str], Awaitable[None]] = getattr(host.runtime, operation)
    with pytest.raises(SandboxUnavailable):
        await method(secrets.token_hex(8))


async def test_the_channel_closes_when_pid_1_ends(host: Host) -> None:
    async with started(host) as sandbox:
        os.kill(sandbox.watched.pid, 9)
        assert await asyncio.wait_for(sandbox.lost, SOON_S)


async def test_pid_1_ends_when_its_stdin_is_closed(host: Host) -> None:
    async with started(host) as sandbox:
        pid = sandbox.watched.pid
        assert sandbox.channel._transport is not None
        sandbox.channel._transport.write_eof()
        await asyncio.to_thread(wait_until, lambda: not is_alive(pid), SOON_S, "PID 1 ends")


async def test_pid_1_gets_its_streams_and_no_other_descriptor(host: Host) -> None:
    if not isinstance(host.runtime, OciRuntime):
        pytest.skip("the engine passes no descriptor")
    async with started(host) as sandbox:
        folder = Path(f"/proc/{sandbox.watched.pid}/fd")
        links = {int(number): os.readlink(folder / number) for number in os.listdir(folder)}
    assert {number for number, link in links.items() if link.startswith("socket:")} == {0, 1, 3}
    assert links[3] != links[0]
    assert not [link for link in links.values() if link.startswith("/")], "a file of the host, such as the lock"


async def test_no_program_of_a_call_gets_the_descriptor_of_the_streams(host: Host) -> None:
    async with started(host) as sandbox:
        assert b"socket:" not in await _run_script(sandbox, b"ls -l /proc/self/fd; ls -l /proc/$$/fd")


async def test_streams_continue_with_the_next_holder_and_end_with_a_shutdown(host: Host) -> None:
    async with started(host) as sandbox:
        with await host.runtime.open_stream_channel(sandbox.id) as channel:
            channel.setblocking(True)
            process = await asyncio.to_thread(_start_process, channel.dup())
            # PID 1 and the frames of calls have no part in the streams.
            assert b"well" in await _run_script(sandbox, b"echo well")
            await asyncio.to_thread(_finish_process, channel.dup(), process)
            [server] = [pid for pid in sandbox.watched.processes() if b"streams" in read_proc(pid, "cmdline")]
            channel.shutdown(socket.SHUT_RDWR)
            await asyncio.to_thread(wait_until, lambda: not is_alive(server), SOON_S, "the stream server ends")
        assert b"well" in await _run_script(sandbox, b"echo well")


def _start_process(channel: socket.socket) -> int:
    """Start a process as the first holder of a channel, which then leaves. Return the process's number."""
    with channel:
        client = StreamClient(channel)
        client.begin_epoch()
        stream = client.open("process", argv=["sh", "-c", "echo first; read line; echo $line"], stdin=True)
        stream.read_until(b"first\n")
        return int(stream.opened()["process"])


def _finish_process(channel: socket.socket, process: int) -> None:
    """Attach to the process as the next holder, give it a line, and read to its end."""
    with channel:
        client = StreamClient(channel)
        client.begin_epoch()
        attach: dict[str, Any] = {"process": process, "from": "start", "writer": "test"}
        stream = client.open("attach", **attach)
        stream.read_until(b"first\n")
        stream.write(b"second\n")
        assert stream.end()["exit_code"] == 0
        assert stream.data == b"first\nsecond\n"


async def test_streams_serve_a_terminal_beside_calls_until_their_channel_closes(host: Host) -> None:
    async with started(host) as sandbox:
        with await host.runtime.open_stream_channel(sandbox.id) as channel:
            channel.setblocking(True)
            client = StreamClient(channel)
            await asyncio.to_thread(client.begin_epoch)
            stream = client.open("process", argv=["bash", "--norc"], pty={"cols": 90, "rows": 30}, env={"PS1": "$ "})
            await asyncio.to_thread(stream.write, b"stty size; tty; id -u; echo $GIT_TERMINAL_PROMPT; pwd\n")
            output = await asyncio.to_thread(stream.read_until, b"/workspace")
            assert b"30 90" in output
            assert b"/dev/pts/0" in output
            # The kill of what a call has left spares the terminal.
            assert await _run_script(sandbox, b"setsid sleep 1000 & echo x") == b"x\n"
            await asyncio.to_thread(stream.write, b"echo still $((20 + 1))\nexit 5\n")
            assert (await asyncio.to_thread(stream.end))["exit_code"] == 5
            assert b"still 21" in stream.data
            asleep = client.open("process", argv=["sleep", "1000"])
            await asyncio.to_thread(asleep.opened)
            before = sandbox.watched.processes()
            channel.shutdown(socket.SHUT_RDWR)
        await asyncio.to_thread(
            wait_until, lambda: len(sandbox.watched.processes()) <= len(before) - 2, SOON_S, "server and process end"
        )


async def _run_script(sandbox: Started, script: bytes) -> bytes:
    """Return the output of a script that runs as a call."""
    capture = {"stdout": 8192, "stderr": 8192}
    fields: dict[str, Any] = {"argv": None, "script_bytes": len(script), "capture": capture, "max_bytes": 8192}
    request = ExecRequest(cwd=None, state="keep", live=False, spill=None, timeout_s=20.0, **fields)
    header = {**request.as_header(), "id": secrets.token_hex(16), "body_bytes": len(script)}
    sandbox.channel.send(header, script)
    output = b""
    while (frame := await asyncio.wait_for(sandbox.frames.get(), SOON_S)).header["ev"] == "data":
        output += frame.body
    assert frame.header["exit_code"] == 0, (frame.header, output)
    return output


async def test_the_error_for_a_missing_image_names_it(host: Host) -> None:
    unknown = "toolcrew-test/nowhere:1"
    spec = replace(host.spec, image=unknown, image_facts=type(host.spec.image_facts)())
    name = host.name()
    with pytest.raises(SandboxUnavailable, match=unknown):
        await host.runtime.start(spec, name)
    await host.runtime.remove(name)
    assert await host.runtime.list_sandboxes(host.deployment) == []


async def test_a_failed_start_leaves_nothing_after_removal(host: Host) -> None:
    spec = replace(host.spec, guest_volume=None, image_facts=replace(host.spec.image_facts, variables=("PATH=/",)))
    spec = replace(spec, limits=replace(spec.limits, nofile=1 << 40))  # more than the kernel allows
    name = host.name()
    with pytest.raises(SandboxUnavailable):
        await host.runtime.start(spec, name)
    await host.runtime.remove(name)
    assert await host.runtime.list_sandboxes(host.deployment) == []


async def test_a_cancelled_start_leaves_nothing_after_removal(host: Host) -> None:
    name = host.name()
    starting = asyncio.ensure_future(host.runtime.start(host.spec, name))
    await asyncio.sleep(0.01)  # into the middle of the start, wherever that is
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        started_late = await starting
        started_late.sock.close()
    await host.runtime.remove(name)
    await wait_until_async(lambda: _is_empty(host), SOON_S, "the engine may create it late, and it is removed then")


async def _is_empty(host: Host) -> bool:
    return await host.runtime.list_sandboxes(host.deployment) == []


async def test_many_sandboxes_start_and_end_concurrently(host: Host) -> None:
    async def one() -> set[int]:
        async with started(host) as sandbox:
            return set(sandbox.watched.processes())

    pids = set().union(*await asyncio.gather(*(one() for _ in range(8))))
    assert len(pids) >= 8
    assert not [pid for pid in pids if is_alive(pid)]
    assert await host.runtime.list_sandboxes(host.deployment) == []


SCRIPT = b"sleep 30"
OUTPUT = b"seq 1 40 | cat; echo error >&2"
EDITS = json.dumps([{"old_string": "one", "new_string": "two"}]).encode()
_JOB: dict[str, Any] = {"job": "job-1", "timeout_s": 20.0}
_FILE: dict[str, Any] = {"path": "file.txt", "timeout_s": 20.0}
_SEARCH: dict[str, Any] = {"path": ".", "include_ignored": False, "limit": 10, "max_bytes": 8192, "timeout_s": 20.0}
REQUEST_BODIES: list[tuple[GuestRequest[Any], bytes]] = [
    (
        ExecRequest(
            argv=None,
            script_bytes=len(OUTPUT),
            cwd=None,
            capture={"stdout": 8192, "stderr": 8192, "merged": 8192},
            state="keep",
            spill={"bytes": 10, "lines": 2},
            live=True,
            max_bytes=8192,
            timeout_s=20.0,
        ),
        OUTPUT,
    ),
    (WriteFileRequest(mode="create", **_FILE), b"one\n"),
    (EditTextRequest(tolerance="none", max_bytes=8192, **_FILE), EDITS),
    (WriteTextRequest(mode="append", encoding="auto", max_bytes=8192, **_FILE), b"three\n"),
    (ReadTextRequest(offset=1, limit=10, column=1, encoding="auto", max_bytes=8192, **_FILE), b""),
    (ReadFileRequest(max_bytes=8192, **_FILE), b""),
    (GlobRequest(pattern="*", kind="file", live_bytes=100, **_SEARCH), b""),
    (
        GrepRequest(
            pattern="two",
            mode="content",
            ignore_case=False,
            fixed_strings=False,
            multiline=False,
            before=0,
            after=0,
            max_lines=10,
            **_SEARCH,
        ),
        b"",
    ),
    (
        JobStartRequest(script_bytes=len(SCRIPT), cwd=None, label="a job", wait_ms=0, max_bytes=8192, timeout_s=20.0),
        SCRIPT,
    ),
    (JobInputRequest(close=False, **_JOB), b"text"),
    (JobPollRequest(max_bytes=8192, **_JOB), b""),
    (JobListRequest(timeout_s=20.0), b""),
    (JobKillRequest(max_bytes=8192, **_JOB), b""),
]
NOT_READ = {"mode_bits"}
"""Fields of answers that no tool reads, so that they have no record."""
SELDOM = {"supervisor_killed"}
"""Fields of answers that only a fault causes."""


async def test_the_answer_to_every_operation_has_exactly_the_fields_of_its_record(host: Host) -> None:
    assert {request.OP for request, _ in REQUEST_BODIES} == set(REQUESTS)
    async with started(host) as sandbox:
        for request, body in REQUEST_BODIES:
            call = secrets.token_hex(16)
            sandbox.channel.send({**request.as_header(), "id": call, "body_bytes": len(body)}, body)
            streams = set()
            while (frame := await asyncio.wait_for(sandbox.frames.get(), SOON_S)).header["ev"] == "data":
                streams.add(frame.header["stream"])
            answer = parse_guest_answer(request, frame.header)
            assert not isinstance(answer, FailedAnswer), (request, answer.error)
            assert streams <= request.STREAMS
            done = frame.header.keys() - {"id", "ev", "kill", "run_s"}
            own = type(answer).model_fields.keys() - GuestAnswer.model_fields.keys()
            assert (request.OP, done - NOT_READ) == (request.OP, own - SELDOM)
            assert_same_fields(answer, frame.header)


def assert_same_fields(record: BaseModel, sent: Mapping[str, Any]) -> None:
    """Check that every record within an answer has exactly the fields that the guest sent."""
    for name in type(record).model_fields:
        value = getattr(record, name)
        for inner, raw in list_records(value, sent.get(name)):
            assert (name, type(inner).model_fields.keys()) == (name, raw.keys())
            assert_same_fields(inner, raw)


def list_records(value: object, sent: Any) -> list[tuple[BaseModel, Mapping[str, Any]]]:
    """Return the records of a field, each with the dictionary that the guest sent."""
    if isinstance(value, BaseModel):
        return [(value, sent)]
    if isinstance(value, dict):
        return [(inner, sent[name]) for name, inner in value.items() if isinstance(inner, BaseModel)]
    if isinstance(value, list):
        return [(inner, raw) for inner, raw in zip(value, sent, strict=True) if isinstance(inner, BaseModel)]
    return []
