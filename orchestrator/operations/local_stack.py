"""Embedded stack: redis-server, sandboxd, a worker of each kind, a stream gateway, Flower and the API as child
processes of one supervisor process. The children end when the supervisor ends.

If a class of tenants has network egress, the egress proxy is also a child. A child that ends by itself is started again
(supervision.py).

`python -m toolcrew.orchestrator.operations.local_stack` is the supervisor process. Its first line on stdout is
StackInfo as JSON. It stops everything on SIGTERM, SIGINT, or when its stdin ends, so a stack never outlives the
program that started it.
"""

import asyncio
import contextlib
import gc
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from toolcrew.archives.base import STORE_SETTING
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.errors import BrokerUnavailable, ConfigError, OperatorError, SandboxUnavailable, ToolcrewError
from toolcrew.contract.names import catalog_key
from toolcrew.contract.programs import program
from toolcrew.contract.settings import PULLED_IMAGES, OrchestratorSettings, child_environment, load_settings
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.orchestrator.operations.redis_server import find_redis_server, write_redis_config
from toolcrew.orchestrator.operations.stack_data import StackData, open_image_records, open_stack_data
from toolcrew.orchestrator.operations.supervision import ChildPlan, ProcessSupervisor
from toolcrew.store.api_keys import ApiKeys
from toolcrew.store.connection import check_redis, open_redis
from toolcrew.store.run_log import close_unused_sessions

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
SWEEP_TIMEOUT_S = 10.0
"""Seconds that the end of a stack waits for a restarted sandboxd, because only sandboxd finds and removes the sandboxes
that the sandboxd before it has left.
"""
WEB_STOP_TIMEOUT_S = 5.0
"""Seconds that the web worker has to stop. No caller waits for its calls any more, and it has no state to hand over."""
WEB_CONCURRENCY = 2
"""Number of processes of the web worker. Each process costs memory, and web tools mostly wait for the network."""
WORKERS_ONLY = "--workers-only"
STOP_AND_REMOVE = signal.SIGUSR1
"""Signal that ends sandboxd and removes its sessions. After any other signal, sandboxd keeps its sessions for the next
sandboxd process.
"""
API_KEY_TTL_S = 30 * 86_400.0
"""Lifetime of the stack's API key, in seconds. The lifetime limits the use of the key if no process is left to revoke
it and the Redis of the stack continues to run.
"""
API_ROLE = "api"
API_STOP_WITHIN_S = 5.0
STACK_FILE = "stack.json"
SUPERVISOR_LOG = "keeper.log"


@dataclass(frozen=True)
class LocalApi:
    """API of a stack: its address, and an administrator's key that is revoked when the stack ends."""

    broker: BrokerSettings
    port: int
    key: str
    key_id: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def plan(self, environment: Mapping[str, str]) -> ChildPlan:
        """Return how the API's process is started. A TOOLCREW_API_KEY in the environment is for commands, so it is not
        passed to the API.
        """
        argv = program("toolcrew.orchestrator", "serve", "api", "--port", str(self.port))
        return ChildPlan(
            API_ROLE, argv, {**environment, "TOOLCREW_API_KEY": ""}, signal.SIGKILL, stop_within_s=API_STOP_WITHIN_S
        )

    @classmethod
    async def prepare(cls, broker: BrokerSettings, port: int) -> "LocalApi":
        """Create the administrator's key for the API of a stack. Raises BrokerUnavailable."""
        client = open_redis(broker)
        try:
            created = await ApiKeys(client, broker.deployment, broker.signing_keys()).add(
                DEFAULT_TENANT, "admin", name="embedded stack", ttl_s=API_KEY_TTL_S
            )
        finally:
            await client.aclose()
        return cls(broker, port, created.text, created.id)

    async def revoke(self) -> None:
        """Revoke the key. If Redis has ended, the key no longer exists."""
        client = open_redis(self.broker)
        try:
            with contextlib.suppress(BrokerUnavailable):
                await ApiKeys(client, self.broker.deployment, self.broker.signing_keys()).revoke(self.key_id)
        finally:
            await client.aclose()


class StackInfo(BaseModel):
    """Addresses of a stack's parts. `pids`: role -> process ids at this moment; `read_stack` returns current ids.
    `workspace_store`: the store of uploads and artifacts; None: none.
    """

    model_config = ConfigDict(frozen=True)

    deployment: str
    redis_url: str
    sandboxd_socket: str
    flower_url: str | None
    api_url: str | None = None
    api_key: str | None = None
    pids: dict[str, list[int]]
    logs: str
    workspace_store: str | None = None


def read_stack(logs: str) -> StackInfo:
    """Return a running stack. `logs`: its folder. Raises FileNotFoundError when the stack has ended."""
    return StackInfo.model_validate_json((Path(logs) / STACK_FILE).read_text())


def check_packages(*, workers_only: bool) -> None:
    """Raise ConfigError that names all packages of a stack that are not installed."""
    needed = ["docker", "trafilatura", *([] if workers_only else ["flower"])]
    if missing := [package for package in needed if importlib.util.find_spec(package) is None]:
        raise ConfigError(
            f"a stack on this host needs packages that are not installed ({', '.join(missing)}): pip install "
            "'toolcrew[worker,ops]', or set TOOLCREW_REDIS_URL to a running pool"
        )


class LocalStack:
    """Starts and stops the children. All files are in one folder with mode 0700, which is deleted at the end, except
    for the data in `data`. `port`: port of the API; None: any free port. `workers_only`: start neither Flower nor the
    API.
    """

    def __init__(
        self,
        settings: OrchestratorSettings,
        data: StackData | None = None,
        port: int | None = None,
        *,
        workers_only: bool = False,
    ) -> None:
        self._settings = settings
        self._data = data
        self._port = port
        self._workers_only = workers_only
        self._folder = Path(tempfile.mkdtemp(prefix="toolcrew-"))
        self._supervisor = ProcessSupervisor(self._folder, report=self._print, changed=self._write_info)
        self._info: StackInfo | None = None
        self._api: LocalApi | None = None

    def keep_image_records(self, folder: Path) -> None:
        """Let sandboxd keep the records of pulled images in this folder, which outlives the stack as the images do."""
        state = self._folder / "sandboxd"
        state.mkdir(mode=0o700)
        (state / PULLED_IMAGES).symlink_to(folder)

    async def start(self) -> StackInfo:
        """Start all parts, and return when calls can be served. Raises OperatorError with the last log lines of a
        part that did not start.
        """
        check_packages(workers_only=self._workers_only)
        redis_url = await self._start_redis()
        broker = self._settings.broker(redis_url)
        sandboxd_socket = self._folder / "sandboxd.sock"
        sockets = {"TOOLCREW_SANDBOXD_SOCKET": str(sandboxd_socket)}
        # Removed from sandboxd's environment, because sandboxd neither uses Redis nor verifies signatures.
        nothing = {"TOOLCREW_REDIS_URL": "", "TOOLCREW_SECRET": "", "TOOLCREW_SECRETS_PREVIOUS": ""}
        broker.signing_keys()  # Raise ConfigError now if there is no signing key, and not at the first call.
        if self._data is not None:
            await self._forget_last_stack(broker)
        sockets |= await self._start_egress(nothing)
        store = self._settings.workspace_store or (str(self._data.store) if self._data is not None else None)
        stored = {STORE_SETTING: store} if store is not None else {}
        environment = {**sockets, **nothing, **stored, **self._sandboxd_environment()}
        await self._start_python("sandboxd", "toolcrew.workers.sandboxd", environment)
        shared = {**self._settings.for_children(), **stored, "TOOLCREW_REDIS_URL": redis_url}
        await self._start_python("worker", "toolcrew.workers", {**sockets, **shared, "TOOLCREW_WORKER_KIND": "sandbox"})
        # The gateway of an embedded stack serves this host only, at any free port.
        streams = {"TOOLCREW_STREAM_ADDRESS": "127.0.0.1", "TOOLCREW_STREAM_PORT": "0"}
        await self._start_python("stream-gateway", "toolcrew.workers.stream_gateway", {**sockets, **shared, **streams})
        web = {
            "TOOLCREW_WORKER_KIND": "web",
            "TOOLCREW_WORKER_QUEUES": "",
            "TOOLCREW_CONCURRENCY": str(WEB_CONCURRENCY),
        }
        await self._start_python("web", "toolcrew.workers", {**shared, **web})
        if not self._workers_only:
            self._api = await LocalApi.prepare(broker, self._port or reserve_port())
            await self._supervisor.start(self._api.plan(shared))
        await self._wait_for_workers(broker)
        flower_url = None if self._workers_only else await self._start_flower(redis_url)
        self._info = StackInfo(
            deployment=self._settings.deployment,
            redis_url=redis_url,
            sandboxd_socket=str(sandboxd_socket),
            flower_url=flower_url,
            api_url=await self._wait_for_api(self._api) if self._api is not None else None,
            api_key=self._api.key if self._api is not None else None,
            pids=self._pids(),
            logs=str(self._folder),
            workspace_store=store,
        )
        self._write_info()
        return self._info

    def _sandboxd_environment(self) -> dict[str, str]:
        """Return sandboxd's name and folder. Its sessions survive a restart of sandboxd, but not the end of the
        stack. With a data folder, checkpoints also survive that.
        """
        data = self._data
        return {
            "TOOLCREW_DEPLOYMENT": self._settings.deployment,
            "TOOLCREW_SANDBOXD_NAME": data.sandboxd_name if data is not None else f"local-{secrets.token_hex(4)}",
            "TOOLCREW_SANDBOXD_STATE": str(data.sandboxd if data is not None else self._folder / "sandboxd"),
        }

    async def watch(self) -> str:
        """Start processes again that end by themselves. If that does not help, return the reason. Cancel this method
        before you call `stop`.
        """
        return self._last_lines(await self._supervisor.watch())

    async def stop(self) -> None:
        """Stop all parts: sandboxes first, so that no task of the worker waits for one, and Redis last."""
        await self._wait_for_sandbox_removal()
        if self._api is not None:
            await self._api.revoke()
        for roles in (("api",), ("sandboxd",), ("worker", "web", "stream-gateway", "flower", "egress"), ("redis",)):
            await asyncio.gather(*(self._supervisor.stop(role) for role in roles))
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _wait_for_sandbox_removal(self) -> None:
        """Wait until a restarted sandboxd has removed the frozen sandboxes of a killed one. It does that before it
        listens.
        """
        if not self._supervisor.has_ended("sandboxd"):
            return
        await self._supervisor.start_again("sandboxd")
        with contextlib.suppress(SandboxUnavailable):
            async for _ in self._attempts("sandboxd", within_s=SWEEP_TIMEOUT_S):
                if _is_listening(self._folder / "sandboxd.sock"):
                    break

    def _pids(self) -> dict[str, list[int]]:
        return self._supervisor.pids() | {"orchestrator": [os.getpid()]}

    def _write_info(self) -> None:
        """Write the current process ids to the stack's file."""
        if self._info is None:
            return
        temporary = self._folder / f"{STACK_FILE}.new"
        temporary.write_text(self._info.model_copy(update={"pids": self._pids()}).model_dump_json())
        os.replace(temporary, self._folder / STACK_FILE)

    def _print(self, message: str) -> None:
        line = f"toolcrew: {message}\n"
        sys.stderr.write(line)
        sys.stderr.flush()
        with open(self._folder / SUPERVISOR_LOG, "a") as log:
            log.write(line)

    async def _start_redis(self) -> str:
        if self._settings.redis_url is not None:
            broker = self._settings.broker()
            await _ping(broker)
            return broker.redis_url.get_secret_value()
        data, port = self._data, reserve_port()
        password = data.redis_password if data is not None else secrets.token_urlsafe(24)
        config = write_redis_config(self._folder, port, password, data.redis if data is not None else None)
        await self._supervisor.start(ChildPlan("redis", (find_redis_server(), str(config)), {}, signal.SIGKILL))
        url = f"redis://:{password}@127.0.0.1:{port}/0"
        await self._wait_for_redis(self._settings.broker(url))
        return url

    async def _start_egress(self, nothing: Mapping[str, str]) -> dict[str, str]:
        """Return the environment with the address of the egress proxy; empty when no class needs it or a proxy
        already runs.
        """
        if not self._settings.needs_egress():
            return {}
        path = self._folder / "egress.sock"
        sockets = {"TOOLCREW_EGRESS_SOCKET": str(path)}
        # Only the sandboxd of this stack may connect. It runs with the same uid.
        await self._start_python(
            "egress", "toolcrew.workers.egress", {**sockets, **nothing, "TOOLCREW_EGRESS_ALLOW_UIDS": ""}
        )
        async for _ in self._attempts("egress"):
            if path.exists():
                break
        return sockets

    async def _start_flower(self, redis_url: str) -> str:
        port, password = reserve_port(), secrets.token_urlsafe(12)
        environment = {
            **self._settings.for_children(),
            "TOOLCREW_REDIS_URL": redis_url,
            # Flower signs nothing.
            "TOOLCREW_SECRET": "",
            "TOOLCREW_SECRETS_PREVIOUS": "",
            "FLOWER_ADDRESS": "127.0.0.1",
            "FLOWER_PORT": str(port),
            "FLOWER_BASIC_AUTH": f"toolcrew:{password}",
            # With this setting a restarted Flower continues with its saved state. The state is deleted at the end of
            # the stack.
            "FLOWER_PERSISTENT": "True",
            "FLOWER_DB": str(self._folder / "flower.db"),
        }
        if page_url := self._settings.page_url or (self._api.url if self._api is not None else None):
            environment["TOOLCREW_PAGE_URL"] = page_url
        argv = program("toolcrew.orchestrator.operations.flower")
        await self._supervisor.start(ChildPlan("flower", argv, environment, signal.SIGKILL, stop_signal=signal.SIGKILL))
        return f"http://toolcrew:{password}@127.0.0.1:{port}/"

    async def _wait_for_api(self, api: LocalApi) -> str:
        """Wait until the API accepts connections. Return its address."""
        async for _ in self._attempts("api"):
            if await asyncio.to_thread(_is_port_open, api.port):
                break
        return api.url

    async def _wait_for_redis(self, broker: BrokerSettings) -> None:
        client = open_redis(broker)
        try:
            async for _ in self._attempts("redis"):
                with contextlib.suppress(BrokerUnavailable):
                    await check_redis(client, broker)
                    return
        finally:
            await client.aclose()

    async def _forget_last_stack(self, broker: BrokerSettings) -> None:
        """Close the sessions of the last stack with this data: its sandboxes were removed, even if it was killed.
        Otherwise they would be listed as open, and count for their tenants, for the rest of their time to live. Delete
        the catalogs of its workers: they would look like those of the new workers (`_wait_for_workers`).
        """
        client = open_redis(broker)
        try:
            await close_unused_sessions(client, broker.deployment, broker.signing_keys())
            await client.delete(*_catalog_keys(broker))
        finally:
            await client.aclose()

    async def _wait_for_workers(self, broker: BrokerSettings) -> None:
        client, keys = open_redis(broker), _catalog_keys(broker)
        try:
            async for _ in self._attempts("sandboxd", "worker", "web"):
                if await client.exists(*keys) == len(keys):
                    return
        finally:
            await client.aclose()

    async def _attempts(self, *roles: str, within_s: float = READY_TIMEOUT_S) -> AsyncIterator[None]:
        """Yield every 50 ms while the child processes live. Raises SandboxUnavailable with the last log lines of a
        child if the child ends or the time is up.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        while loop.time() < until:
            for role in roles:
                if not self._supervisor.is_running(role):
                    raise SandboxUnavailable(self._last_lines(role))
            yield
            await asyncio.sleep(0.05)
        raise SandboxUnavailable(
            f"{' and '.join(roles)} were not ready within {within_s:g} s: read their logs in {self._folder}"
        )

    async def _start_python(self, role: str, module: str, environment: Mapping[str, str]) -> None:
        """Start a Python process of this project. If this process is killed, the kernel sends SIGTERM to the child,
        which limits the time of its own shutdown (workers/lifeline.py).
        """
        ask = STOP_AND_REMOVE if role == "sandboxd" else signal.SIGTERM
        plan = ChildPlan(
            role,
            program(module),
            environment,
            orphan_signal=ask,
            stop_signal=ask,
            stop_within_s=WEB_STOP_TIMEOUT_S if role in ("web", "stream-gateway") else STOP_TIMEOUT_S,
            may_finish=role in ("worker", "web"),
        )
        await self._supervisor.start(plan)

    def _last_lines(self, role: str) -> str:
        text = (self._folder / f"{role}.log").read_text(errors="replace").strip()
        lines = text.splitlines()[-5:]
        reason = find_start_failure(lines)
        return reason or f"{role} ended unexpectedly: {' | '.join(lines) or 'its log is empty'}"


def _is_listening(path: Path) -> bool:
    """Return whether a process accepts connections at the socket. The socket of a killed process accepts none."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) == 0


def _is_port_open(port: int) -> bool:
    """Return whether a process accepts connections at that port of loopback."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _catalog_keys(broker: BrokerSettings) -> list[str]:
    """Return the keys that exist while workers of both kinds take calls."""
    return [catalog_key(broker.deployment, pool) for pool in ("sandbox", "web")]


async def _ping(broker: BrokerSettings) -> None:
    client = open_redis(broker)
    try:
        await check_redis(client, broker)
    finally:
        await client.aclose()


async def keep(
    settings: OrchestratorSettings,
    announce: Callable[[StackInfo], None],
    *,
    until_eof: bool,
    announce_end: Callable[[], None] | None = None,
    data: Path | None = None,
    port: int | None = None,
    workers_only: bool = False,
) -> int:
    """Run a stack until a signal or, when `until_eof`, the end of stdin. Return the exit code. `data`: the folder for
    its Redis data and checkpoints. `port`: port of its API. `workers_only`: start neither Flower nor the API.

    Calls `announce` when the stack serves, and `announce_end` before SIGINT or SIGTERM stops it. After SIGHUP there
    is no terminal to write to. Raises ConfigError for a data folder or port that cannot be used.
    """
    if data is not None and settings.redis_url is not None:
        raise ConfigError(
            "--data is for the stack's own Redis, but TOOLCREW_REDIS_URL is the address of another one: omit one "
            "of them"
        )
    if port is not None and _is_port_open(port):
        raise ConfigError(f"another program uses port {port}: select another port with --port")
    with contextlib.ExitStack() as folders:
        stack_data = folders.enter_context(open_stack_data(data)) if data is not None else None
        stack = LocalStack(settings, stack_data, port, workers_only=workers_only)
        if data is None:
            stack.keep_image_records(folders.enter_context(open_image_records()))
        return await _run_stack(stack, announce, until_eof=until_eof, announce_end=announce_end)


async def _run_stack(
    stack: LocalStack,
    announce: Callable[[StackInfo], None],
    *,
    until_eof: bool,
    announce_end: Callable[[], None] | None,
) -> int:
    stop, received = asyncio.Event(), list[int]()

    def stop_by(number: int) -> None:
        received.append(number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop_by, number)
    if until_eof:
        await _watch_stdin(stop)
    try:
        starting, stopped = asyncio.create_task(stack.start()), asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 130
        announce(await starting)
        lost = asyncio.create_task(stack.watch())
        await asyncio.wait({lost, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            sys.stderr.write(f"toolcrew: {lost.result()}\n")
            return 1
        if announce_end is not None and received and received[0] != signal.SIGHUP:
            announce_end()
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        return 0
    finally:
        await stack.stop()


async def _watch_stdin(stop: asyncio.Event) -> None:
    class _Eof(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            stop.set()

    await asyncio.get_running_loop().connect_read_pipe(_Eof, sys.stdin)


@asynccontextmanager
async def embedded_stack(overrides: Mapping[str, str], *, workers_only: bool) -> AsyncIterator[StackInfo]:
    """Start a stack in a child process, and stop it at the end. Raises OperatorError with the reason when it does not
    start.
    """
    supervisor = await asyncio.create_subprocess_exec(
        *program("toolcrew.orchestrator.operations.local_stack", *([WORKERS_ONLY] if workers_only else [])),
        env=child_environment(overrides),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    assert supervisor.stderr is not None
    errors = asyncio.create_task(supervisor.stderr.read())
    stack: StackInfo | None = None
    try:
        line = await supervisor.stdout.readline()
        if not line:
            message = (await errors).decode(errors="replace").strip()
            raise OperatorError(
                message.removeprefix("toolcrew: ") or "the embedded stack did not start and printed no reason"
            )
        stack = StackInfo.model_validate_json(line)
        yield stack
    finally:
        # The end of stdin makes the supervisor stop everything. Shielded, so that a cancelled program leaves no
        # process.
        supervisor.stdin.close()
        await asyncio.shield(supervisor.wait())
        errors.cancel()
        if stack is not None:
            # A supervisor that was killed could not delete its folder.
            shutil.rmtree(stack.logs, ignore_errors=True)


def print_json(stack: StackInfo) -> None:
    """Print StackInfo as one line of JSON on stdout."""
    sys.stdout.write(stack.model_dump_json() + "\n")
    sys.stdout.flush()


def find_start_failure(lines: Sequence[str]) -> str | None:
    """Return the reason why a process did not start, from its log lines; None if the lines contain no reason."""
    for line in reversed(lines):
        # The line may be truncated or come from another program. Then try the line before.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            if entry["event"] == "not_started":
                return str(entry["error"])
    return None


def main() -> int:
    gc.freeze()  # the modules live as long as the process: never search them for garbage (contract/startup.py)
    try:
        return asyncio.run(keep(load_settings(), print_json, until_eof=True, workers_only=WORKERS_ONLY in sys.argv[1:]))
    except ToolcrewError as error:
        sys.stderr.write(f"toolcrew: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
