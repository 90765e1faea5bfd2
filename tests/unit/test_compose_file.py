"""docker-compose.yml and the Dockerfile preserve the architecture: networks, sockets and permissions."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.operations.redis_users import ROLES, build_users, hash_password
from workers.egress.daemon import MAX_CONNECTIONS
from workers.sandboxd.runtime.oci import FOLDER
from workers.settings import EgressSettings, SandboxdSettings

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("redis", "sandboxd", "egress", "worker", "web-worker", "orchestrator", "api", "flower")
WORKERS = ("worker", "web-worker")
USERS = {
    "orchestrator": "orchestrator",
    "api": "orchestrator",
    "worker": "worker",
    "web-worker": "web",
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


def load_environment(name: str, **given: str) -> dict[str, str]:
    """Return a service's environment as compose fills it in: the given values, then the file's defaults, and no unset
    variables.
    """
    filled = {}
    for key, value in load_service(name)["environment"].items():
        if value is None:
            continue
        filled[key] = VARIABLE.sub(
            lambda found: given.get(found["name"], (found["rest"] or "") if found["how"] == ":-" else ""), str(value)
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
    found = re.fullmatch(r"(\d+)([a-z]*)", VARIABLE.sub(lambda variable: variable["rest"], text))
    assert found is not None, text
    return int(found[1]) * UNITS[found[2]]


def find_stages() -> dict[str, str]:
    """Return the lines of each stage."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def find_user(service: str) -> tuple[int, int]:
    """Return the uid and the gid of a service's image."""
    found = re.findall(r"^USER (\d+):(\d+)$", find_stages()[service], flags=re.MULTILINE)
    assert len(found) == 1, f"{service} needs one numeric USER"
    return int(found[0][0]), int(found[0][1])


def find_services_naming(word: str) -> set[str]:
    return {name for name in SERVICES if word in yaml.safe_dump(load_service(name))}


def test_no_service_but_sandboxd_sees_a_path_of_the_host() -> None:
    named = set(COMPOSE["volumes"])
    assert {name for name in SERVICES if set(find_mounts(name).values()) - named} == {"sandboxd"}


def test_sandboxd_has_the_rights_to_start_sandboxes_and_no_other() -> None:
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
    assert "/var/lib/docker:/var/lib/docker:ro" in sandboxd["volumes"]
    assert f"{FOLDER}:{FOLDER}" in sandboxd["volumes"]


def test_services_have_their_networks_limits_and_names() -> None:
    assert find_services_naming("TOOLCREW_TENANT_CLASSES") == {"sandboxd"}
    assert load_service("redis")["networks"] == ["backend"]
    # A worker resolves no public names.
    assert load_service("worker")["dns"] == "127.0.0.1"
    # A connection of the proxy needs two files.
    assert load_service("egress")["ulimits"]["nofile"] >= 2 * MAX_CONNECTIONS + 256
    # Two stacks on one engine do not remove each other's sandboxes.
    assert load_environment("sandboxd", COMPOSE_PROJECT_NAME="other")["TOOLCREW_SANDBOXD_NAME"] == "other"


def test_only_flower_and_the_api_publish_a_port_and_on_loopback_unless_reported() -> None:
    assert {name for name in SERVICES if "ports" in load_service(name)} == {"flower", "api"}
    assert load_service("api")["ports"] == ["${TOOLCREW_API_BIND:-127.0.0.1}:${TOOLCREW_API_PORT:-8080}:8080"]
    assert load_service("flower")["ports"] == ["${TOOLCREW_FLOWER_BIND:-127.0.0.1}:${TOOLCREW_FLOWER_PORT:-5555}:5555"]


@pytest.mark.parametrize("name", SERVICES)
class TestEveryService:
    def test_gets_no_right_it_does_not_need(self, name: str) -> None:
        service = load_service(name)
        loose = set(
            [
                "privileged",
                "pid",
                "ipc",
                "uts",
                "userns_mode",
                "devices",
                "volumes_from",
                "user",
                "group_add",
                "entrypoint",
            ]
        )
        assert not loose & service.keys()
        assert service.get("network_mode") in (None, "none")
        assert service["cap_drop"] == ["ALL"]
        is_sandboxd = name == "sandboxd"
        for granted in ("cap_add", "device_cgroup_rules"):
            assert (granted in service) == is_sandboxd
        unconfined = ["seccomp:unconfined", "apparmor:unconfined"] if is_sandboxd else []
        assert service["security_opt"] == ["no-new-privileges:true", *unconfined]

    def test_cannot_write_but_to_its_own_volumes_and_a_small_tmp(self, name: str) -> None:
        service = load_service(name)
        assert service["read_only"] is True
        (tmp,) = service["tmpfs"]
        path, options = tmp.split(":")
        assert path == "/tmp"
        assert {"noexec", "nosuid", "nodev"} <= set(options.split(","))
        assert re.search(r"\bsize=\d+m\b", options)

    def test_is_bounded_in_memory_processes_and_logs(self, name: str) -> None:
        service = load_service(name)
        assert parse_size(service["mem_limit"]) > 0
        assert service["pids_limit"] > 0
        assert {"max-size", "max-file"} <= service["logging"]["options"].keys()

        # A worker that was drained ends in order, and must not come back.
        assert service["restart"] == ("on-failure" if name in WORKERS else "unless-stopped")


@pytest.mark.parametrize("secret", SECRETS)
def test_a_stack_without_its_secrets_is_refused(secret: str) -> None:
    uses = [found for found in VARIABLE.finditer(TEXT) if found["name"] == secret]
    assert uses
    assert {found["how"] for found in uses} == {":?"}


def test_no_secret_is_written_in_the_file() -> None:
    for name in SERVICES:
        for key, value in load_service(name)["environment"].items():
            if value is not None and re.search(r"PASSWORD|SECRET|KEY|AUTH|_URL$", key):
                assert VARIABLE.sub("", value) in ("", ":", f"redis://{USERS.get(name)}:@redis:6379/0"), key


def test_a_secret_goes_only_to_who_needs_it() -> None:
    assert find_services_naming("TOOLCREW_SECRET") == {*WORKERS, "orchestrator", "api"}
    owners = {role: {"redis", *(service for service, user in USERS.items() if user == role)} for role in USERS.values()}
    assert {role: find_services_naming(name) for role, name in PASSWORDS.items()} == {**owners, "admin": {"redis"}}
    assert find_services_naming("TOOLCREW_TAVILY_API_KEY") == {"web-worker"}
    assert find_services_naming("TOOLCREW_BRAVE_API_KEY") == {"web-worker"}
    assert find_services_naming("TOOLCREW_EXA_API_KEY") == {"web-worker"}
    assert find_services_naming("TOOLCREW_SEARXNG_URL") == {"web-worker"}
    assert find_services_naming("TOOLCREW_FLOWER_PASSWORD") == {"flower"}
    assert find_services_naming("OPENAI_API_KEY") == {"orchestrator", "api"}


def test_every_variable_is_reported_in_the_example_and_no_secret_has_a_value_there() -> None:
    example = (ROOT / "deploy" / ".env.example").read_text(encoding="utf-8")
    result = dict(re.findall(r"^#?([A-Z0-9_]+)=(.*)$", example, flags=re.MULTILINE))
    passed_on = {key for name in SERVICES for key, value in load_service(name)["environment"].items() if value is None}
    assert result.keys() == {found["name"] for found in VARIABLE.finditer(TEXT)} | passed_on
    assert {result[secret] for secret in SECRETS} == {""}


def test_every_service_but_sandboxd_has_an_unprivileged_uid_of_its_own() -> None:
    uids = {name: find_user(name)[0] for name in SERVICES}
    assert uids.pop("sandboxd") == 0
    assert all(uid >= 1000 for uid in uids.values())
    assert len(set(uids.values())) == len(uids)


def test_the_users_of_redis_are_the_generated_ones() -> None:
    marked = build_users("@DEPLOYMENT@", {role: f"@{role.upper()}@" for role in ROLES})
    assert (ROOT / "deploy" / "redis-users.acl").read_text(encoding="utf-8") == marked


def test_redis_is_started_with_the_users_that_have_passwords(tmp_path: Path) -> None:
    """The script itself runs, with a redis-server that only prints its users."""
    server = tmp_path / "redis-server"
    server.write_text('#!/bin/sh\ncat "$ACL"\nenv\n')
    server.chmod(0o755)
    acl = tmp_path / "users.acl"
    script = (ROOT / "deploy" / "redis-start").read_text(encoding="utf-8")
    script = script.replace("/tmp/users.acl", str(acl)).replace("/etc/toolcrew/", f"{ROOT}/deploy/")
    passwords = {name: f"{role}-word" for role, name in PASSWORDS.items()}
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "ACL": str(acl), "TOOLCREW_DEPLOYMENT": "prod", **passwords}
    ran = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, timeout=20, check=True)
    assert ran.stdout.startswith(build_users("prod", {role: hash_password(f"{role}-word") for role in ROLES}))
    assert "-word" not in ran.stdout
    assert acl.stat().st_mode & 0o777 == 0o600
    # A name with a star would open other deployments to these users.
    for name, value, result in (
        ("REDIS_WEB_PASSWORD", "", "is not set"),
        ("DEPLOYMENT", "pr*", "letters, digits"),
        ("DEPLOYMENT", "a/b", "digits"),
    ):
        wrong = {**environment, f"TOOLCREW_{name}": value}
        ran = subprocess.run(["sh", "-c", script], env=wrong, capture_output=True, text=True, timeout=20, check=False)
        assert (ran.returncode, f"TOOLCREW_{name}" in ran.stderr, result in ran.stderr) == (64, True, True)


def test_a_new_env_file_has_every_secret_and_is_never_overwritten(tmp_path: Path) -> None:
    env = tmp_path / "env"
    command = [str(ROOT / "deploy" / "make-env"), str(env)]
    subprocess.run(command, capture_output=True, timeout=20, check=True)
    text = dict(re.findall(r"^([A-Z_]+)=(.*)$", env.read_text(encoding="utf-8"), flags=re.MULTILINE))
    made = [text[secret] for secret in SECRETS]
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in made)
    assert len(set(made)) == len(SECRETS)
    assert env.stat().st_mode & 0o777 == 0o600
    assert subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 1


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_has_memory_for_its_calls(name: str) -> None:
    # With sandboxes, a call is a thread that waits. Otherwise, each call has its own process.
    each = 64 if name == "worker" else 256
    concurrency = int(load_environment(name)["TOOLCREW_CONCURRENCY"])
    assert parse_size(load_service(name)["mem_limit"]) >= (concurrency * each + 512) * 1024**2


def test_redis_keeps_what_it_was_reported_and_drops_nothing_to_make_room() -> None:
    lines = (ROOT / "deploy" / "redis.conf").read_text(encoding="utf-8").splitlines()
    options = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    assert (options["appendonly"], options["maxmemory-policy"]) == ("yes", "noeviction")
    assert options["protected-mode"] == "yes"
    assert options["dir"] in find_mounts("redis")
    # A rewrite of the log may copy data that changes during the rewrite.
    assert parse_size(options["maxmemory"]) * 2 <= parse_size(load_service("redis")["mem_limit"])


def test_packages_are_installed_by_hash_and_without_an_index() -> None:
    installs = [line for line in DOCKERFILE.splitlines() if "pip --python" in line]
    assert len(installs) == 2
    assert all("--no-index" in line for line in installs)
    assert "--require-hashes" in installs[0]
    assert "services.lock" in installs[0]


def test_the_build_sees_only_what_it_copies() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*"
    copied = [
        line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ") and "--from=" not in line
    ]
    sources = {source.rstrip("/") for sources_of_copy in copied for source in sources_of_copy}
    assert {pattern.removeprefix("!") for pattern in patterns[1:]} == sources


def test_only_sandboxd_is_given_the_engine() -> None:
    assert find_services_naming("docker.sock") == {"sandboxd"}
    assert find_services_naming("DOCKER_HOST") == set()
    assert "/var/run/docker.sock" in find_mounts("sandboxd")


def test_sandboxd_has_no_network() -> None:
    sandboxd = load_service("sandboxd")
    assert sandboxd["network_mode"] == "none"
    assert not {"networks", "ports", "extra_hosts"} & sandboxd.keys()


def test_the_egress_proxy_has_the_way_out_and_nothing_else() -> None:
    egress = load_service("egress")
    assert egress["networks"] == ["egress"]
    assert set(find_mounts("egress").values()) == {"egress-socket"}
    assert not {"ports", "extra_hosts"} & egress.keys()
    assert not any(word in yaml.safe_dump(egress) for word in ("REDIS", "SECRET", "sandboxd", "API_KEY"))


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


def test_the_worker_is_on_the_network_without_a_way_out_and_on_no_other() -> None:
    assert load_service("worker")["networks"] == ["backend"]
    assert COMPOSE["networks"]["backend"]["internal"] is True


def test_the_network_without_a_way_out_does_not_lead_to_the_host_either() -> None:
    assert COMPOSE["networks"]["backend"]["driver_opts"]["com.docker.network.bridge.inhibit_ipv4"] == "true"


def test_the_socket_of_sandboxd_is_for_the_worker_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    worker_uid, worker_gid = find_user("worker")
    for key, value in load_environment("sandboxd").items():
        monkeypatch.setenv(key, value)
    settings = SandboxdSettings()
    assert settings.sandboxd_allow_uids == [worker_uid]
    assert find_user("sandboxd")[1] == worker_gid
    assert f"install -d -o 0 -g {worker_gid} -m 0750 {settings.sandboxd_socket.parent}" in find_stages()["runtime"]
    web_uid, web_gid = find_user("web-worker")
    assert web_uid != worker_uid
    assert web_gid != worker_gid
    mounting = {name for name in SERVICES if "sandboxd-socket" in find_mounts(name).values()}
    assert mounting == {"sandboxd", "worker"}
    assert f"sandboxd-socket:{settings.sandboxd_socket.parent}:ro" in load_service("worker")["volumes"]


def test_the_web_worker_reaches_the_web_and_no_sandbox() -> None:
    web = load_service("web-worker")
    assert web["networks"] == ["backend", "egress"]
    assert find_mounts("web-worker") == {}
    assert "sandboxd" not in yaml.safe_dump(web)
    assert load_environment("web-worker")["TOOLCREW_WORKER_KIND"] == "web"
    assert "TOOLCREW_WORKER_KIND" not in load_environment("worker")
