"""docker-compose.yml and the Dockerfile preserve the architecture: networks, sockets and permissions."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolcrew.contract.settings import EgressSettings, SandboxdSettings
from toolcrew.orchestrator.operations.redis_users import ROLES, build_users, hash_password
from toolcrew.workers.egress.daemon import MAX_CONNECTIONS
from toolcrew.workers.sandboxd.runtime.cgroup_namespace import HOST_NAMESPACE
from toolcrew.workers.sandboxd.runtime.containerd import DEFAULT_ADDRESS
from toolcrew.workers.sandboxd.runtime.oci import FOLDER

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("redis", "sandboxd", "egress", "worker", "stream-gateway", "web-worker", "orchestrator", "api", "flower")
WORKERS = ("worker", "web-worker")
USERS = {
    "orchestrator": "orchestrator",
    "api": "orchestrator",
    "worker": "worker",
    "web-worker": "web",
    "stream-gateway": "streams",
    "flower": "flower",
}
"""Service -> its user of Redis's."""
PASSWORDS = {role: f"TOOLCREW_REDIS_{role.upper()}_PASSWORD" for role in ROLES}
SECRETS = (*PASSWORDS.values(), "TOOLCREW_SECRET", "TOOLCREW_FLOWER_PASSWORD")
UNITS = {"k": 1024, "m": 1024**2, "mb": 1024**2, "g": 1024**3}
VARIABLE = re.compile(r"(?<!\$)\$\{(?P<name>\w+)(?:(?P<how>:[-?])(?P<rest>[^}]*))?\}")

TEXT = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")


def load_service(name: str) -> dict[str, Any]:
    service: dict[str, Any] = COMPOSE["services"][name]
    return service


def load_environment(name: str, **values: str) -> dict[str, str]:
    """Return a service's environment as compose fills it in: the given values, then the file's defaults, and no unset
    variables.
    """
    filled = {}
    for key, value in load_service(name)["environment"].items():
        if value is None:
            continue
        filled[key] = VARIABLE.sub(
            lambda match: values.get(match["name"], (match["rest"] or "") if match["how"] == ":-" else ""), str(value)
        )
    return filled


def find_mounts(name: str) -> dict[str, str]:
    """Return the volumes of a service, target -> source, in either notation."""
    mounts = {}
    for volume in load_service(name).get("volumes", []):
        if isinstance(volume, dict):
            mounts[volume["target"]] = volume["source"]
        else:
            source, target = volume.split(":")[:2]
            mounts[target] = source
    return mounts


def parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([a-z]*)", VARIABLE.sub(lambda variable: variable["rest"], text))
    assert match is not None, text
    return int(match[1]) * UNITS[match[2]]


def find_stages() -> dict[str, str]:
    """Return the lines of each stage."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def find_user(service: str) -> tuple[int, int]:
    """Return the uid and the gid of a service's image."""
    match = re.findall(r"^USER (\d+):(\d+)$", find_stages()[service], flags=re.MULTILINE)
    assert len(match) == 1, f"{service} needs one numeric USER"
    return int(match[0][0]), int(match[0][1])


def find_services_naming(fragment: str) -> set[str]:
    return {name for name in SERVICES if fragment in yaml.safe_dump(load_service(name))}


def test_only_sandboxd_mounts_host_paths() -> None:
    named = set(COMPOSE["volumes"])
    assert {name for name in SERVICES if set(find_mounts(name).values()) - named} == {"sandboxd"}


def test_sandboxd_has_only_the_capabilities_to_start_sandboxes() -> None:
    """tests/e2e/test_compose.py shows that these are enough."""
    sandboxd = load_service("sandboxd")
    assert sandboxd["cap_add"] == [
        "SYS_ADMIN",
        "SETUID",
        "SETGID",
        "SETFCAP",
        "DAC_OVERRIDE",
        "CHOWN",
        "FOWNER",
        "FSETID",
    ]
    assert sandboxd["device_cgroup_rules"] == ["b 7:* rw", "c 10:237 rw"]
    for folder in ("/var/lib/docker", "/var/lib/containerd", str(Path(DEFAULT_ADDRESS).parent)):
        assert f"{folder}:{folder}:ro" in sandboxd["volumes"]
    assert f"{FOLDER}:{FOLDER}" in sandboxd["volumes"]
    assert sandboxd["ulimits"] == {"memlock": "${TOOLCREW_MEMLOCK:--1}"}
    assert find_mounts("sandboxd")[str(HOST_NAMESPACE)] == "${TOOLCREW_CGROUP_NAMESPACE:-/proc/1/ns/cgroup}"


def test_services_have_their_networks_limits_and_deployment_names() -> None:
    assert find_services_naming("TOOLCREW_TENANT_CLASSES") == {"sandboxd"}
    assert load_service("redis")["networks"] == ["backend"]
    # A worker resolves no public names.
    assert load_service("worker")["dns"] == "127.0.0.1"
    # A connection of the proxy needs two files.
    assert load_service("egress")["ulimits"]["nofile"] >= 2 * MAX_CONNECTIONS + 256
    # Two stacks on one engine do not remove each other's sandboxes.
    assert load_environment("sandboxd", COMPOSE_PROJECT_NAME="other")["TOOLCREW_SANDBOXD_NAME"] == "other"


def test_only_flower_and_the_api_publish_ports_on_loopback_by_default() -> None:
    assert {name for name in SERVICES if "ports" in load_service(name)} == {"flower", "api"}
    assert load_service("api")["ports"] == ["${TOOLCREW_API_BIND:-127.0.0.1}:${TOOLCREW_API_PORT:-8080}:8080"]
    assert load_service("flower")["ports"] == ["${TOOLCREW_FLOWER_BIND:-127.0.0.1}:${TOOLCREW_FLOWER_PORT:-5555}:5555"]


@pytest.mark.parametrize("name", SERVICES)
class TestEveryService:
    def test_has_no_unneeded_privileges(self, name: str) -> None:
        service = load_service(name)
        forbidden = set(
            [
                "privileged", "pid", "ipc", "uts", "userns_mode", "devices", "volumes_from", "user", "group_add",
                "entrypoint",
            ]
        )  # fmt: skip
        assert not forbidden & service.keys()
        assert service.get("network_mode") in (None, "none")
        assert service["cap_drop"] == ["ALL"]
        is_sandboxd = name == "sandboxd"
        for granted in ("cap_add", "device_cgroup_rules"):
            assert (granted in service) == is_sandboxd
        unconfined = ["seccomp:unconfined", "apparmor:unconfined"] if is_sandboxd else []
        assert service["security_opt"] == ["no-new-privileges:true", *unconfined]

    def test_writes_only_to_its_volumes_and_a_small_tmp(self, name: str) -> None:
        service = load_service(name)
        assert service["read_only"] is True
        (tmp,) = service["tmpfs"]
        path, options = tmp.split(":")
        assert path == "/tmp"
        assert {"noexec", "nosuid", "nodev"} <= set(options.split(","))
        assert re.search(r"\bsize=\d+m\b", options)

    def test_has_limits_for_memory_processes_and_logs(self, name: str) -> None:
        service = load_service(name)
        assert parse_size(service["mem_limit"]) > 0
        assert service["pids_limit"] > 0
        assert {"max-size", "max-file"} <= service["logging"]["options"].keys()

        # A worker that was drained ends in order, and must not come back.
        assert service["restart"] == ("on-failure" if name in WORKERS else "unless-stopped")


@pytest.mark.parametrize("secret", SECRETS)
def test_a_missing_secret_stops_compose(secret: str) -> None:
    uses = [match for match in VARIABLE.finditer(TEXT) if match["name"] == secret]
    assert uses
    assert {match["how"] for match in uses} == {":?"}


def test_the_compose_file_contains_no_secret() -> None:
    for name in SERVICES:
        for key, value in load_service(name)["environment"].items():
            if value is not None and re.search(r"PASSWORD|SECRET|KEY|AUTH|_URL$", key):
                assert VARIABLE.sub("", value) in ("", ":", f"redis://{USERS.get(name)}:@redis:6379/0"), key


def test_each_secret_is_passed_only_to_the_services_that_need_it() -> None:
    assert find_services_naming("TOOLCREW_SECRET") == {*WORKERS, "stream-gateway", "orchestrator", "api"}
    owners = {role: {"redis", *(service for service, user in USERS.items() if user == role)} for role in USERS.values()}
    assert {role: find_services_naming(name) for role, name in PASSWORDS.items()} == {**owners, "admin": {"redis"}}
    for name in ("TAVILY_API_KEY", "BRAVE_API_KEY", "EXA_API_KEY", "SEARXNG_URL"):
        assert find_services_naming(f"TOOLCREW_{name}") == {"web-worker"}
    assert find_services_naming("TOOLCREW_FLOWER_PASSWORD") == {"flower"}
    assert find_services_naming("OPENAI_API_KEY") == {"orchestrator", "api"}


def test_the_env_example_lists_every_variable_without_secret_values() -> None:
    example = (ROOT / "deploy" / ".env.example").read_text(encoding="utf-8")
    result = dict(re.findall(r"^#?([A-Z0-9_]+)=(.*)$", example, flags=re.MULTILINE))
    passed_through = {
        key for name in SERVICES for key, value in load_service(name)["environment"].items() if value is None
    }
    assert result.keys() == {match["name"] for match in VARIABLE.finditer(TEXT)} | passed_through
    assert {result[secret] for secret in SECRETS} == {""}


def test_every_service_but_sandboxd_has_an_unprivileged_uid_of_its_own() -> None:
    uids = {name: find_user(name)[0] for name in SERVICES}
    assert uids.pop("sandboxd") == 0
    assert all(uid >= 1000 for uid in uids.values())
    assert len(set(uids.values())) == len(uids)


def test_redis_users_acl_is_the_generated_file() -> None:
    marked = build_users("@DEPLOYMENT@", {role: f"@{role.upper()}@" for role in ROLES})
    assert (ROOT / "deploy" / "redis-users.acl").read_text(encoding="utf-8") == marked


def test_redis_start_writes_hashed_passwords_and_refuses_invalid_values(tmp_path: Path) -> None:
    """The script itself runs, with a redis-server that only prints its users."""
    server = tmp_path / "redis-server"
    server.write_text('#!/bin/sh\ncat "$ACL"\nenv\n')
    server.chmod(0o755)
    acl = tmp_path / "users.acl"
    script = (ROOT / "deploy" / "redis-start").read_text(encoding="utf-8")
    script = script.replace("/tmp/users.acl", str(acl)).replace("/etc/toolcrew/", f"{ROOT}/deploy/")
    passwords = {name: f"{role}-word" for role, name in PASSWORDS.items()}
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "ACL": str(acl), "TOOLCREW_DEPLOYMENT": "prod", **passwords}
    process = subprocess.run(
        ["sh", "-c", script], env=environment, capture_output=True, text=True, timeout=20, check=True
    )
    assert process.stdout.startswith(build_users("prod", {role: hash_password(f"{role}-word") for role in ROLES}))
    assert "-word" not in process.stdout
    assert acl.stat().st_mode & 0o777 == 0o600
    # A name with a star would open other deployments to these users.
    for name, value, result in (
        ("REDIS_WEB_PASSWORD", "", "is not set"),
        ("DEPLOYMENT", "pr*", "letters, digits"),
        ("DEPLOYMENT", "a/b", "digits"),
    ):
        invalid = {**environment, f"TOOLCREW_{name}": value}
        process = subprocess.run(
            ["sh", "-c", script], env=invalid, capture_output=True, text=True, timeout=20, check=False
        )
        assert (process.returncode, f"TOOLCREW_{name}" in process.stderr, result in process.stderr) == (64, True, True)


def test_make_env_creates_every_secret_and_never_overwrites_the_file(tmp_path: Path) -> None:
    env = tmp_path / "env"
    command = [str(ROOT / "deploy" / "make-env"), str(env)]
    subprocess.run(command, capture_output=True, timeout=20, check=True)
    text = dict(re.findall(r"^([A-Z_]+)=(.*)$", env.read_text(encoding="utf-8"), flags=re.MULTILINE))
    secrets = [text[secret] for secret in SECRETS]
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in secrets)
    assert len(set(secrets)) == len(SECRETS)
    assert env.stat().st_mode & 0o777 == 0o600
    # Even root cannot read this link in some virtual machines.
    assert os.access(text.get("TOOLCREW_CGROUP_NAMESPACE", "/proc/1/ns/cgroup"), os.R_OK) or os.geteuid() != 0
    assert subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_limits_of_a_user_who_is_not_root_are_not_those_of_the_engine() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        for name in ("make-env", ".env.example"):
            shutil.copy(ROOT / "deploy" / name, folder)
        os.chown(folder, 65534, 65534)
        limits = ["prlimit", "--memlock=65536:65536", f"{folder}/make-env", f"{folder}/env"]
        subprocess.run(limits, user=65534, group=65534, capture_output=True, timeout=20, check=True)
        assert "\n#TOOLCREW_MEMLOCK=-1\n" in Path(folder, "env").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", WORKERS)
def test_the_memory_limit_of_a_worker_covers_its_concurrency(name: str) -> None:
    # With sandboxes, a call is a thread that waits. Otherwise, each call has its own process.
    each = 64 if name == "worker" else 256
    concurrency = int(load_environment(name)["TOOLCREW_CONCURRENCY"])
    assert parse_size(load_service(name)["mem_limit"]) >= (concurrency * each + 512) * 1024**2


def test_redis_persists_data_and_evicts_nothing() -> None:
    lines = (ROOT / "deploy" / "redis.conf").read_text(encoding="utf-8").splitlines()
    options = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    assert (options["appendonly"], options["maxmemory-policy"]) == ("yes", "noeviction")
    assert options["protected-mode"] == "yes"
    assert options["dir"] in find_mounts("redis")
    # A rewrite of the log may copy data that changes during the rewrite.
    assert parse_size(options["maxmemory"]) * 2 <= parse_size(load_service("redis")["mem_limit"])


def test_docker_packages_are_installed_by_hash_and_without_an_index() -> None:
    installs = [line for line in DOCKERFILE.splitlines() if "pip --python" in line]
    assert len(installs) == 2
    assert all("--no-index" in line for line in installs)
    assert "--require-hashes" in installs[0]
    assert "services.lock" in installs[0]


def test_the_docker_build_context_contains_only_copied_files() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*"
    copy_sources = [
        line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ") and "--from=" not in line
    ]
    sources = {source.rstrip("/") for sources_of_copy in copy_sources for source in sources_of_copy}
    assert {pattern.removeprefix("!") for pattern in patterns[1:]} == sources


def test_only_sandboxd_has_the_docker_socket() -> None:
    assert find_services_naming("docker.sock") == {"sandboxd"}
    assert find_services_naming("DOCKER_HOST") == set()
    assert "/var/run/docker.sock" in find_mounts("sandboxd")


def test_sandboxd_has_no_network() -> None:
    sandboxd = load_service("sandboxd")
    assert sandboxd["network_mode"] == "none"
    assert not {"networks", "ports", "extra_hosts"} & sandboxd.keys()


def test_the_egress_proxy_has_only_the_egress_network_and_socket() -> None:
    egress = load_service("egress")
    assert egress["networks"] == ["egress"]
    assert set(find_mounts("egress").values()) == {"egress-socket"}
    assert not {"ports", "extra_hosts"} & egress.keys()
    assert not any(fragment in yaml.safe_dump(egress) for fragment in ("REDIS", "SECRET", "sandboxd", "API_KEY"))


def test_the_egress_proxy_and_sandboxd_share_a_private_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {**load_environment("sandboxd"), **load_environment("egress")}.items():
        monkeypatch.setenv(key, value)
    proxy, sandboxd = EgressSettings(), SandboxdSettings()
    assert proxy.egress_socket == sandboxd.egress_socket
    proxy_uid, proxy_gid = find_user("egress")
    sandboxd_uid, sandboxd_gid = find_user("sandboxd")
    assert proxy.egress_allow_uids == [sandboxd_uid]
    assert sandboxd.egress_uids == [proxy_uid]
    folder = proxy.egress_socket.parent
    assert f"install -d -o {proxy_uid} -g {sandboxd_gid} -m 0750 {folder}" in find_stages()["runtime"]
    assert sandboxd_gid != proxy_gid
    assert {name for name in SERVICES if "egress-socket" in find_mounts(name).values()} == {"sandboxd", "egress"}
    assert f"egress-socket:{folder}:ro" in load_service("sandboxd")["volumes"]


def test_the_worker_is_only_on_the_internal_network_which_does_not_reach_the_host() -> None:
    assert load_service("worker")["networks"] == ["backend"]
    assert COMPOSE["networks"]["backend"]["internal"] is True
    # An address of the bridge would lead to the host.
    assert COMPOSE["networks"]["backend"]["driver_opts"]["com.docker.network.bridge.inhibit_ipv4"] == "true"


def test_only_the_worker_and_the_stream_gateway_can_access_the_sandboxd_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    worker_uid, worker_gid = find_user("worker")
    for key, value in load_environment("sandboxd").items():
        monkeypatch.setenv(key, value)
    settings = SandboxdSettings()
    gateway_uid, gateway_gid = find_user("stream-gateway")
    assert (settings.sandboxd_allow_uids, settings.sandboxd_gateway_uids) == ([worker_uid], [gateway_uid])
    assert gateway_gid == worker_gid
    assert find_user("sandboxd")[1] == worker_gid
    assert f"install -d -o 0 -g {worker_gid} -m 0750 {settings.sandboxd_socket.parent}" in find_stages()["runtime"]
    web_uid, web_gid = find_user("web-worker")
    assert web_uid != worker_uid
    assert web_gid != worker_gid
    services = {name for name in SERVICES if "sandboxd-socket" in find_mounts(name).values()}
    assert services == {"sandboxd", "worker", "stream-gateway"}
    for name in ("worker", "stream-gateway"):
        assert f"sandboxd-socket:{settings.sandboxd_socket.parent}:ro" in load_service(name)["volumes"]


def test_the_web_worker_has_web_access_and_no_sandbox_access() -> None:
    web = load_service("web-worker")
    assert web["networks"] == ["backend", "egress"]
    assert find_mounts("web-worker") == {}
    assert "sandboxd" not in yaml.safe_dump(web)
    assert load_environment("web-worker")["TOOLCREW_WORKER_KIND"] == "web"
    assert "TOOLCREW_WORKER_KIND" not in load_environment("worker")
