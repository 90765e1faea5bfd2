"""Redis servers with their own rules (users, memory, a master), sentinels that watch the servers, and a worker that
counts executed calls.
"""

import contextlib
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import redis

from tests.support.stack.service_process import run_program
from tests.support.stack.stack import Footprint, open_footprint, require_redis_server
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.names import catalog_key
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.orchestrator.operations.redis_server import write_redis_config
from toolcrew.orchestrator.operations.redis_users import ROLES, build_users, hash_password
from toolcrew.store.connection import CONNECTION_OPTIONS

SECRET = "a-secret-of-the-test"
START_S = 90.0


@dataclass
class Server:
    """A redis-server on loopback. `passwords`: of its users. `password`: of the default user, or of the admin if the
    default user is off.
    """

    port: int
    password: str
    process: "subprocess.Popen[bytes]"
    passwords: Mapping[str, str] = field(default_factory=dict)

    def url(self, user: str | None = None) -> str:
        """Return the address for a user, or for the default user."""
        return f"redis://{user or ''}:{self.passwords[user] if user else self.password}@127.0.0.1:{self.port}/0"

    def client(self, user: str | None = None) -> "redis.Redis":
        """Return a client with all rights, or with the rights of `user`."""
        full = "admin" if self.passwords else None
        return redis.Redis.from_url(self.url(user or full), socket_timeout=10, **CONNECTION_OPTIONS)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def open_server(*rules: str, users: bool = False, password: str = "") -> Iterator[Server]:
    """Run a server with these lines in its configuration, and stop the server on exit. `users`: use the generated
    users and no default user.
    """
    folder = Path(tempfile.mkdtemp(prefix="tct-redis-", dir="/tmp"))
    port, password = reserve_port(), password or secrets.token_hex(16)
    passwords = {role: secrets.token_hex(16) for role in ROLES} if users else {}
    config = write_redis_config(folder, port, password)
    lines = [*config.read_text().splitlines(), *rules]
    if users:
        acl = folder / "users.acl"
        acl.write_text(build_users("default", {role: hash_password(word) for role, word in passwords.items()}))
        lines = [line for line in lines if not line.startswith("requirepass")] + [f'aclfile "{acl}"']
    config.write_text("\n".join(lines) + "\n")
    process = subprocess.Popen(
        [require_redis_server(), str(config)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    server = Server(port, password, process, passwords)
    try:
        wait_until(lambda: answers(server.client), START_S, "redis-server answers")
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def answers(open_client: "Callable[[], redis.Redis]") -> bool:
    """Return whether the server answers with its data loaded."""
    with open_client() as client, contextlib.suppress(redis.RedisError):
        return bool(client.ping())
    return False


@contextlib.contextmanager
def open_sentinel(master: Server, name: str) -> Iterator[int]:
    """Run a sentinel and yield its port. The sentinel alone watches `master` as `name`, and fails over after one
    second without an answer.
    """
    folder = Path(tempfile.mkdtemp(prefix="tct-sentinel-", dir="/tmp"))
    port = reserve_port()
    rules = (
        "bind 127.0.0.1",
        f"port {port}",
        f'dir "{folder}"',
        f"sentinel monitor {name} 127.0.0.1 {master.port} 1",
        f"sentinel auth-pass {name} {master.password}",
        f"sentinel down-after-milliseconds {name} 1000",
        f"sentinel failover-timeout {name} 5000",
    )
    config = folder / "sentinel.conf"
    config.write_text("\n".join(rules) + "\n")
    argv = [require_redis_server(), str(config), "--sentinel"]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class CountingPool:
    """A worker without sandboxes, and the effects of its calls. `broker`: the settings with which a sender of calls
    reaches the same Redis.
    """

    broker: BrokerSettings
    worker: "subprocess.Popen[bytes]"
    footprint: Footprint

    @property
    def marks(self) -> Path:
        return self.footprint.folder / "marks"

    def acted(self, call_id: str) -> int:
        """Return how often a call was executed."""
        return self.marks.read_text().split().count(call_id) if self.marks.exists() else 0

    def log(self) -> str:
        """Return the output of the worker so far."""
        return (self.footprint.folder / "worker.log").read_text(errors="replace")


@contextlib.contextmanager
def open_counting_pool(
    broker: BrokerSettings, worker_url: str, watch: "redis.Redis", *, environment: Mapping[str, str] | None = None
) -> Iterator[CountingPool]:
    """Run a worker that serves calls. `watch`: the client that waits for the worker's catalog."""
    settings = {
        "TOOLCREW_REDIS_URL": worker_url,
        "TOOLCREW_SECRET": SECRET,
        "TOOLCREW_CONCURRENCY": "2",
        "TOOLCREW_WORKER_KIND": "web",
        **(environment or {}),
    }
    argv = [sys.executable, "-m", "tests.support.stack.tool_worker"]
    with open_footprint() as footprint, run_program(footprint, "worker", argv, settings) as worker:
        pool = CountingPool(broker, worker, footprint)
        wait_until(lambda: watch.exists(catalog_key("default", "web")) or worker.poll() is not None, SOON_S, pool.log)
        assert worker.poll() is None, pool.log()
        yield pool


def broker_for(url: str, **fields: object) -> BrokerSettings:
    """Return the settings of a sender that shares the worker's secret."""
    return BrokerSettings.model_validate({"redis_url": url, "secret": SECRET, **fields})
