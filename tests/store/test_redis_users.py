"""The generated Redis users on a real server: the commands that each role may not run, in any order with other
commands.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from tests.support.redis.redis_harness import Server, open_server
from toolcrew.contract import names
from toolcrew.contract.errors import ConfigError
from toolcrew.orchestrator.cli.config import config_app
from toolcrew.orchestrator.operations.redis_users import ROLES, build_users, hash_password
from toolcrew.store import blobs as blob_store
from toolcrew.store import metrics
from toolcrew.store.blobs import WorkerBlobs
from toolcrew.store.hosts import worker_slots_key

LIMITED = ("orchestrator", "worker", "web", "streams", "flower")
INSPECTING_COMMANDS = (
    "KEYS *",
    "SCAN 0",
    "RANDOMKEY",
    "DBSIZE",
    "MONITOR",
    "PUBSUB CHANNELS",
    "CLIENT LIST",
    "SLOWLOG GET",
    "ACL LIST",
    "ACL WHOAMI",
)
CHANGING_COMMANDS = (
    "FLUSHALL", "FLUSHDB", "CONFIG GET requirepass", "CONFIG SET dir /tmp", "SHUTDOWN NOSAVE", "DEBUG SLEEP 0", "REPLICAOF localhost 1",
    "MODULE LIST", "ACL SETUSER me on nopass ~* +@all", "SWAPDB 0 1", "SCRIPT FLUSH", "SCRIPT KILL", "BGREWRITEAOF", "CLIENT KILL TYPE normal", "SAVE",
)  # fmt: skip
DEP = "default"
KEYS = {
    "host queue": "host.a.1",
    "host control": names.control_queue("host.a.1"),
    "web queue": "pool.web",
    "result": names.result_key("ab12-c1"),
    "unacknowledged": "unacked",
    "api keys": names.api_keys_key(DEP),
    "admission": f"{names.admission_prefix(DEP)}state",
    "tenants": names.tenants_key(DEP),
    "call": names.call_key(DEP, "acme", "c1"),
    "blob of sandboxes": names.blob_key(DEP, "acme", "sandbox", "b1"),
    "blob of the web": names.blob_key(DEP, "acme", "web", "b1"),
    "place": names.location_key(DEP, "acme", "s1"),
    "open sessions": names.tenant_sessions_key(DEP, "acme"),
    "session's state": names.session_state_key(DEP, "acme", "s1"),
    "web cache": f"toolcrew:{DEP}:t:acme:web.index",
    "tools of sandboxes": names.catalog_key(DEP, "sandbox"),
    "tools of the web": names.catalog_names_key(DEP, "web"),
    "operators' tools": names.catalog_key(DEP, "tools"),
    "report of a host": names.host_key(DEP, "host.a.1"),
    "end of a host": names.tombstone_key(DEP, "host.a.1"),
    "slots of a host": worker_slots_key(DEP, "host.a.1"),
    "report of a web worker": names.host_key(DEP, "pool.b.2"),
    "end of a web worker": names.tombstone_key(DEP, "pool.b.2"),
    "slots of the web": names.slots_key(DEP, "pool.web"),
    "sums of metrics": metrics.metrics_key(DEP),
    "counts of a host": metrics.counted_key(DEP, "a.1"),
    "gauges of a host": metrics.host_gauges_key(DEP, "host.a.1"),
    "stream gateway": names.stream_gateway_key(DEP, "host.a.1"),
    "another deployment": names.tenants_key("other"),
    "a key of a stranger": "another-program",
}
WORKERS = {"result", "unacknowledged", "tenants", "call"}
ACCESSIBLE_KEYS = {
    "orchestrator": KEYS.keys() - {"unacknowledged", "another deployment", "a key of a stranger"},
    # What a session is, and what its host says: nothing that a worker with the network could change.
    "worker": WORKERS
    | {
        "blob of sandboxes",
        "host queue",
        "host control",
        "place",
        "open sessions",
        "session's state",
        "tools of sandboxes",
    }
    | {
        "report of a host",
        "end of a host",
        "slots of a host",
        "sums of metrics",
        "counts of a host",
        "gauges of a host",
    },
    "web": WORKERS
    | {"blob of the web", "web queue", "web cache", "session's state", "tools of the web", "operators' tools"}
    | {"report of a web worker", "end of a web worker", "slots of the web"},
    "streams": {"stream gateway"},
    "flower": set[str](),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with open_server(users=True) as opened:
        yield opened


def is_refused(client: "redis.Redis", *command: str) -> bool:
    """Return whether the user has no permission. Any other reply counts as allowed."""
    try:
        client.execute_command(*command)
    except redis.exceptions.NoPermissionError:
        return True
    except redis.exceptions.ResponseError as error:
        # Since Redis 7, the server refuses this command to every user before it checks permissions.
        return str(error).startswith("DEBUG command not allowed")
    return False


@pytest.mark.parametrize("role", LIMITED)
def test_limited_role_cannot_inspect_or_change_the_server(server: Server, role: str) -> None:
    with server.client(role) as client:
        assert [
            command for command in INSPECTING_COMMANDS + CHANGING_COMMANDS if not is_refused(client, *command.split())
        ] == []
        assert client.ping()


def test_only_processes_that_store_data_of_tenants_can_read_redis_memory(server: Server) -> None:
    clients = {role: server.client(role) for role in LIMITED}
    assert [role for role, client in clients.items() if not is_refused(client, "INFO", "memory")] == [
        "orchestrator",
        "worker",
        "web",
    ]
    for client in clients.values():
        client.close()


@pytest.mark.parametrize("role", LIMITED)
def test_role_can_access_only_its_own_keys(server: Server, role: str) -> None:
    with server.client(role) as client:
        assert {name for name, key in KEYS.items() if not is_refused(client, "EXISTS", key)} == ACCESSIBLE_KEYS[role]


# The stream gateway may run no scripts at all.
@pytest.mark.parametrize("role", sorted({*LIMITED} - {"streams"}))
def test_lua_script_has_only_the_permissions_of_its_user(server: Server, role: str) -> None:
    with server.client(role) as client:
        for source in (
            "return redis.call('GET', 'another-program')",
            "return redis.call('KEYS', '*')",
            "return redis.call('FLUSHALL')",
        ):
            with pytest.raises(
                redis.exceptions.ResponseError, match=r"user executing the script can't|ACL failure in script"
            ):
                client.execute_command("EVAL", source, 0)


@pytest.mark.parametrize(("role", "pool"), [("worker", "sandbox"), ("web", "web")])
def test_worker_can_count_blobs(
    server: Server, role: str, pool: names.BlobPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_store, "TENANT_BLOB_BYTES", blob_store.LEAST_CHARGE)
    with server.client(role) as client:
        blobs = WorkerBlobs(client, DEP, pool)
        # The second is counted after the first was looked for.
        client.unlink(blobs.leave("acme", b"x"))
        assert blobs.take("acme", blobs.leave("acme", b"y")) == b"y"


def test_orchestrator_cannot_use_the_celery_control_channel(server: Server) -> None:
    with server.client("orchestrator") as client:
        assert is_refused(client, "PUBLISH", "/0.celery.pidbox", "x")
        assert is_refused(client, "SUBSCRIBE", "/0.celery.pidbox")
        assert is_refused(client, "PSUBSCRIBE", "*")
        assert is_refused(client, "PSUBSCRIBE", "celery-task-meta-*")


def test_orchestrator_can_subscribe_to_results_of_any_hub_name(server: Server) -> None:
    with server.client("orchestrator") as client:
        for hub in ("00ff12aa9b3c", "a7ff12aa9b3c", "ffff12aa9b3c"):
            with client.pubsub() as subscriber:
                subscriber.psubscribe(names.result_channel_pattern(hub))
                message = subscriber.get_message(timeout=5)
                assert message["type"] == "psubscribe"


def test_login_without_password_or_as_default_user_is_refused(server: Server) -> None:
    for url in (
        f"redis://127.0.0.1:{server.port}",
        f"redis://worker:guess@127.0.0.1:{server.port}",
        f"redis://:x@127.0.0.1:{server.port}",
    ):
        with redis.Redis.from_url(url, socket_timeout=5) as client, pytest.raises(redis.exceptions.AuthenticationError):
            client.ping()


def test_unknown_role_is_refused_with_the_list_of_roles() -> None:
    with pytest.raises(ConfigError, match=r"the role 'root' does not exist: use one of orchestrator, worker"):
        build_users("default", {"root": "0" * 64})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOOLCREW_DEPLOYMENT", "prod")
    return tmp_path


def test_config_users_writes_private_acl_and_password_files(folder: Path) -> None:
    ran = CliRunner().invoke(config_app, ["users"])
    assert ran.exit_code == 0, ran.output
    acl, passwords = folder / "users.acl", folder / "redis-passwords.env"
    assert {path.stat().st_mode & 0o777 for path in (acl, passwords)} == {0o600}
    passwords_by_user = dict(line.split("=", 1) for line in passwords.read_text().splitlines())
    assert passwords_by_user.keys() == {f"TOOLCREW_REDIS_{role.upper()}_PASSWORD" for role in ROLES}
    users = acl.read_text()
    assert users.startswith("user default off ")
    assert ("~toolcrew:prod:host:host.*" in users, "toolcrew:default" in users) == (True, False)
    for password in passwords_by_user.values():
        assert len(password) >= 32
        assert password not in acl.read_text() + ran.output
        assert hash_password(password) in acl.read_text()


def test_config_users_overwrites_no_file(folder: Path) -> None:
    (folder / "redis-passwords.env").write_text("mine")
    ran = CliRunner().invoke(config_app, ["users"])
    assert ran.exit_code == 1
    assert not (folder / "users.acl").exists()
    assert (folder / "redis-passwords.env").read_text() == "mine"


@pytest.mark.parametrize("option", ["--out", "--passwords"])
def test_config_users_writes_both_files_or_none(folder: Path, option: str) -> None:
    ran = CliRunner().invoke(config_app, ["users", option, "missing/file"])
    assert ran.exit_code == 1
    assert list(folder.iterdir()) == []


def test_the_users_name_only_subcommands_that_redis_7_0_knows() -> None:
    """Redis 6.2 takes any name, so its tests cannot show this. A later server does not start with an unknown name."""
    users = build_users("default", dict.fromkeys(ROLES, hash_password("x")))
    assert set(re.findall(r"[+-]([a-z]+\|\S+)", users)) <= {
        *("client|getname", "client|id", "client|setname", "script|exists", "script|load")
    }
