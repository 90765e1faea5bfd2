"""The embedded stack: redis-server, sandboxd, a worker of each kind and Flower as child processes of one keeper, taken down with it.

Where a class of tenants has network egress, the egress proxy is one of them.

`python -m orchestrator.local_stack` is the keeper: its first line on stdout is StackInfo as JSON; it takes everything down on
SIGTERM, SIGINT, or when its stdin ends, so that a stack never outlives whoever started it.
"""

import asyncio
import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from contract.errors import BrokerUnavailable, OperatorError, SandboxUnavailable, ToolcrewError
from contract.names import catalog_key
from contract.settings import BrokerSettings
from orchestrator.redis_connection import check_redis, open_redis
from orchestrator.redis_server import find_redis_server, write_redis_config
from orchestrator.settings import OrchestratorSettings, child_environment, load_settings, python

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
WEB_STOP_TIMEOUT_S = 5.0
"""Nobody awaits its calls any more, and they have nothing to hand back."""
WEB_CONCURRENCY = 2
"""Every process of a pool costs memory; web tools mostly wait."""
FLOWER_OPTIONS = {
    "FLOWER_READ_ONLY": "True",
    "FLOWER_MAX_TASKS": "20000",
    "FLOWER_PURGE_OFFLINE_WORKERS": "300",
    "FLOWER_TASK_RUNTIME_METRIC_BUCKETS": "0.1,0.5,1,2,5,10,30,60,120,300,600",
}
"""Read-only, bounded memory, buckets that fit tool calls. docker-compose.yml says the same."""
_PR_SET_PDEATHSIG = 1
_DEATH_SIGNALS = {
    "redis": signal.SIGKILL,
    "flower": signal.SIGKILL,
    "sandboxd": signal.SIGTERM,
    "egress": signal.SIGTERM,
    "worker": signal.SIGTERM,
    "web": signal.SIGTERM,
}
"""What a child gets when the keeper is killed outright. The foreign two have nothing to save. Ours bound their end (workers/lifeline.py)."""


class StackInfo(BaseModel):
    """Where a stack's parts are. `pids`: role -> process ids."""

    model_config = ConfigDict(frozen=True)

    deployment: str
    redis_url: str
    sandboxd_socket: str
    flower_url: str | None
    api_url: str | None = None
    api_key: str | None = None
    pids: dict[str, list[int]]
    logs: str


class LocalStack:
    """Starts and stops the children. Everything it writes lies in one folder of its own, mode 0700, that goes with it."""

    def __init__(self, settings: OrchestratorSettings, *, flower: bool = True) -> None:
        self._settings = settings
        self._flower = flower
        self._folder = Path(tempfile.mkdtemp(prefix="toolcrew-"))
        self._children: dict[str, asyncio.subprocess.Process] = {}

    async def start(self) -> StackInfo:
        """Start all; returns when a call would be served. Raises OperatorError with the last words of what did not start."""
        redis_url = await self._start_redis()
        broker = self._settings.broker(redis_url)
        sandboxd_socket = self._folder / "sandboxd.sock"
        place = {"TOOLCREW_SANDBOXD_SOCKET": str(sandboxd_socket)}
        # Not the broker's: sandboxd neither speaks to Redis nor checks signatures.
        nothing = {"TOOLCREW_REDIS_URL": "", "TOOLCREW_SECRET": ""}
        broker.signing_key()  # says now, not at the first call, that nothing can be signed
        place |= await self._start_egress(nothing)
        await self._spawn(
            "sandboxd",
            [python(), "-m", "workers.sandboxd"],
            {**place, **nothing, **self._sandboxd_environment()},
        )
        shared = {**self._settings.for_children(), "TOOLCREW_REDIS_URL": redis_url}
        await self._spawn("worker", [python(), "-m", "workers"], {**place, **shared, "TOOLCREW_WORKER_KIND": "sandbox"})
        web = {"TOOLCREW_WORKER_KIND": "web", "TOOLCREW_WORKER_QUEUES": "", "TOOLCREW_CONCURRENCY": str(WEB_CONCURRENCY)}
        await self._spawn("web", [python(), "-m", "workers"], {**shared, **web})
        await self._until_workers_ready(broker)
        flower_url = await self._start_flower(redis_url) if self._flower else None
        pids = {role: [child.pid] for role, child in self._children.items()} | {"orchestrator": [os.getpid()]}
        return StackInfo(
            deployment=self._settings.deployment,
            redis_url=redis_url,
            sandboxd_socket=str(sandboxd_socket),
            flower_url=flower_url,
            pids=pids,
            logs=str(self._folder),
        )

    def _sandboxd_environment(self) -> dict[str, str]:
        """A name and a place of its own; nothing of it is for a next stack."""
        return {
            "TOOLCREW_DEPLOYMENT": self._settings.deployment,
            "TOOLCREW_SANDBOXD_NAME": f"local-{secrets.token_hex(4)}",
            "TOOLCREW_SANDBOXD_STATE": str(self._folder / "sandboxd"),
            "TOOLCREW_SANDBOXD_KEEP_SESSIONS": "false",
        }

    async def wait_for_loss(self) -> str:
        """Returns when a child that calls need has ended by itself, with a sentence about it."""
        watched = {asyncio.create_task(child.wait()): role for role, child in self._children.items() if role != "flower"}
        try:
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in watched:
                task.cancel()
        return self._last_words(watched[done.pop()])

    async def stop(self) -> None:
        """Take all down: sandboxes first, so that no task of the worker waits for one; Redis last."""
        for roles in (("sandboxd",), ("worker", "web", "flower", "egress"), ("redis",)):
            await asyncio.gather(*(self._end_child(role) for role in roles))
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _end_child(self, role: str) -> None:
        child = self._children.get(role)
        if child is not None:
            await _end(child, WEB_STOP_TIMEOUT_S if role == "web" else STOP_TIMEOUT_S)

    async def _start_redis(self) -> str:
        if self._settings.redis_url is not None:
            broker = self._settings.broker()
            await _ping(broker)
            return broker.redis_url.get_secret_value()
        password, port = secrets.token_urlsafe(24), _free_port()
        config = write_redis_config(self._folder, port, password)
        await self._spawn("redis", [find_redis_server(), str(config)], {})
        url = f"redis://:{password}@127.0.0.1:{port}/0"
        await self._until_redis_ready(self._settings.broker(url))
        return url

    async def _start_egress(self, nothing: Mapping[str, str]) -> dict[str, str]:
        """Where sandboxd finds the proxy, as an environment; empty when no class needs one, or one runs already."""
        if not self._settings.needs_egress():
            return {}
        path = self._folder / "egress.sock"
        place = {"TOOLCREW_EGRESS_SOCKET": str(path)}
        # Who may connect is the sandboxd of this stack, which runs as we do.
        await self._spawn("egress", [python(), "-m", "workers.egress"], {**place, **nothing, "TOOLCREW_EGRESS_ALLOW_UIDS": ""})
        async for _ in self._attempts("egress"):
            if path.exists():
                break
        return place

    async def _start_flower(self, redis_url: str) -> str:
        port, password = _free_port(), secrets.token_urlsafe(12)
        environment = {
            **FLOWER_OPTIONS,
            "CELERY_BROKER_URL": redis_url,
            "FLOWER_ADDRESS": "127.0.0.1",
            "FLOWER_PORT": str(port),
            "FLOWER_BASIC_AUTH": f"toolcrew:{password}",
        }
        await self._spawn("flower", [python(), "-m", "celery", "flower"], environment)
        return f"http://toolcrew:{password}@127.0.0.1:{port}/"

    async def _until_redis_ready(self, broker: BrokerSettings) -> None:
        client = open_redis(broker)
        try:
            async for _ in self._attempts("redis"):
                with contextlib.suppress(BrokerUnavailable):
                    await check_redis(client, broker)
                    return
        finally:
            await client.aclose()

    async def _until_workers_ready(self, broker: BrokerSettings) -> None:
        keys = [catalog_key(broker.deployment, pool) for pool in ("sandbox", "web")]
        client = open_redis(broker)
        try:
            async for _ in self._attempts("sandboxd", "worker", "web"):
                if await client.exists(*keys) == len(keys):
                    return
        finally:
            await client.aclose()

    async def _attempts(self, *roles: str) -> AsyncIterator[None]:
        """Tries every 50 ms while the children live. Raises SandboxUnavailable with a child's last words when it ends or time is up."""
        loop = asyncio.get_running_loop()
        until = loop.time() + READY_TIMEOUT_S
        while loop.time() < until:
            for role in roles:
                if self._children[role].returncode is not None:
                    raise SandboxUnavailable(self._last_words(role))
            yield
            await asyncio.sleep(0.05)
        raise SandboxUnavailable(f"{' and '.join(roles)} were not ready within {READY_TIMEOUT_S:g} s; logs: {self._folder}")

    async def _spawn(self, role: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        with open(self._folder / f"{role}.log", "ab") as logfile:  # noqa: ASYNC230  # once a process, before anything runs
            self._children[role] = await asyncio.create_subprocess_exec(
                *argv,
                env=child_environment(environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=logfile,
                stderr=logfile,
                start_new_session=True,
                preexec_fn=partial(_die_with_keeper, os.getpid(), _DEATH_SIGNALS[role]),
            )

    def _last_words(self, role: str) -> str:
        text = (self._folder / f"{role}.log").read_text(errors="replace").strip()
        lines = text.splitlines()[-5:]
        told = [line.split(": ", 1)[1] for line in lines if line.startswith(("sandboxd: ", "worker: ", "egress: "))]
        return told[-1] if told else f"{role} ended by itself: {' | '.join(lines) or 'it said nothing'}"


async def _end(child: asyncio.subprocess.Process, within_s: float) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            async with asyncio.timeout(within_s):
                await child.wait()
        except TimeoutError:
            sys.stderr.write(f"process {child.pid} did not stop in {within_s:g} s and is killed\n")
    # Its own session: what a killed parent left of its pool goes, too.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    await child.wait()


def _die_with_keeper(keeper: int, number: int) -> None:
    """In the child: a keeper that is killed outright takes its children with it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != keeper:
        # It died before the wish was made, and no signal will come.
        os._exit(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _ping(broker: BrokerSettings) -> None:
    client = open_redis(broker)
    try:
        await check_redis(client, broker)
    finally:
        await client.aclose()


async def keep(settings: OrchestratorSettings, announce: Callable[[StackInfo], None], *, until_eof: bool) -> int:
    """Run a stack until a signal or, when `until_eof`, the end of stdin; `announce` is told when it serves. Gives the exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    if until_eof:
        await _watch_stdin(stop)
    stack = LocalStack(settings)
    try:
        starting, stopped = asyncio.create_task(stack.start()), asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 130
        announce(await starting)
        lost = asyncio.create_task(stack.wait_for_loss())
        await asyncio.wait({lost, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            sys.stderr.write(f"toolcrew: {lost.result()}\n")
            return 1
        lost.cancel()
        return 0
    finally:
        await stack.stop()


async def _watch_stdin(stop: asyncio.Event) -> None:
    class _Eof(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            stop.set()

    await asyncio.get_running_loop().connect_read_pipe(_Eof, sys.stdin)


@asynccontextmanager
async def embedded_stack(overrides: Mapping[str, str] | None = None) -> AsyncIterator[StackInfo]:
    """A stack of one's own, kept by a child process. Raises OperatorError with the reason when it does not start."""
    keeper = await asyncio.create_subprocess_exec(
        python(),
        "-m",
        "orchestrator.local_stack",
        env=child_environment(overrides or {}),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    errors = asyncio.create_task(keeper.stderr.read())
    stack: StackInfo | None = None
    try:
        line = await keeper.stdout.readline()
        if not line:
            words = (await errors).decode(errors="replace").strip()
            raise OperatorError(words.removeprefix("toolcrew: ") or "the embedded stack did not start and said nothing")
        stack = StackInfo.model_validate_json(line)
        yield stack
    finally:
        # The end of its stdin is the keeper's sign to take everything down; shielded, so that a cancelled program leaves nothing.
        keeper.stdin.close()
        await asyncio.shield(keeper.wait())
        errors.cancel()
        if stack is not None:
            # A keeper that was killed outright could not do it.
            shutil.rmtree(stack.logs, ignore_errors=True)


def print_json(stack: StackInfo) -> None:
    """StackInfo as one line of JSON on stdout."""
    sys.stdout.write(stack.model_dump_json() + "\n")
    sys.stdout.flush()


def main() -> int:
    try:
        return asyncio.run(keep(load_settings(), print_json, until_eof=True))
    except ToolcrewError as error:
        sys.stderr.write(f"toolcrew: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
