"""Start docker-compose.yml on a real engine. The stack serves a call, keeps its isolation, and leaves nothing after
its removal.
"""

import base64
import contextlib
import json
import os
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.sandboxd.image_scan import scan_image
from tests.support.stack.log_lines import read_events
from tests.support.stack.stack import missing, require_engine
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.orchestrator.operations.redis_users import ROLES
from toolcrew.workers.sandboxd.cgroups import Cgroups
from toolcrew.workers.sandboxd.runtime.id_ranges import FIRST_ID
from toolcrew.workers.sandboxd.runtime.oci import FOLDER

ROOT = Path(__file__).resolve().parents[2]
SERVICES = {"redis", "sandboxd", "egress", "worker", "stream-gateway", "web-worker", "orchestrator", "api", "flower"}
BUILD_S, UP_S, HEALTHY_S, DOWN_S, ANSWER_S = 900.0, 240.0, 120.0, 120.0, 120.0

CAPABILITIES = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "FSETID": 4,
    "SETGID": 6,
    "SETUID": 7,
    "SYS_ADMIN": 21,
    "SETFCAP": 31,
}
"""Numbers of the capabilities that the file gives to a service."""
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))

CONNECT_PROGRAM = """
import socket, sys
for host in sys.argv[2:]:
    try:
        socket.create_connection((host, int(sys.argv[1])), 2).close()
        print("open")
    except OSError:
        print("closed")
"""

pytestmark = [pytest.mark.stack, pytest.mark.compose, pytest.mark.timeout(1500)]


@dataclass(frozen=True)
class CommandResult:
    """The exit status and the output of a command."""

    status: int
    out: str
    err: str


def run(argv: list[str], timeout_s: float = ANSWER_S, env: dict[str, str] | None = None) -> CommandResult:
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return CommandResult(done.returncode, done.stdout, done.stderr)


def run_well(argv: list[str], timeout_s: float = ANSWER_S) -> str:
    """Run a command that must succeed, and return its output."""
    completed = run(argv, timeout_s)
    assert completed.status == 0, f"{' '.join(argv)}: {completed.err[-2000:] or completed.out[-2000:]}"
    return completed.out


def find_compose() -> list[str]:
    """Return the command of docker-compose. Skips the test if docker-compose is missing; fails the test where
    everything is required.
    """
    if run(["docker", "compose", "version"]).status == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose") is None:
        missing("there is neither docker-compose nor docker compose: apt-get install docker-compose")
    return ["docker-compose"]


class ComposeStack:
    """A project of docker-compose, with random secrets in a separate env file. The caller's .env and variables are
    ignored.
    """

    def __init__(self, compose: list[str], folder: Path) -> None:
        self.name = f"tctest{secrets.token_hex(4)}"
        self.flower_port = reserve_port()
        self.api_port = reserve_port()
        self.flower_password = secrets.token_hex(16)
        values = {
            "COMPOSE_PROJECT_NAME": self.name,
            **{f"TOOLCREW_REDIS_{role.upper()}_PASSWORD": secrets.token_hex(32) for role in ROLES},
            "TOOLCREW_SECRET": secrets.token_hex(32),
            "TOOLCREW_FLOWER_PASSWORD": self.flower_password,
            "TOOLCREW_FLOWER_PORT": str(self.flower_port),
            "TOOLCREW_API_PORT": str(self.api_port),
            "TOOLCREW_HEALTH_INTERVAL": "10s",
            "TOOLCREW_TENANT_CLASSES": '{"default":{"largest":{"user":"root"}}}',
        }
        host = os.environ.get("DOCKER_HOST", "")
        if host.startswith("unix://"):
            values["TOOLCREW_ENGINE_SOCKET"] = host.removeprefix("unix://")
        if not os.access("/proc/1/ns/cgroup", os.R_OK):
            values["TOOLCREW_CGROUP_NAMESPACE"] = "/proc/2/ns/cgroup"
        if run(["sh", "-c", "ulimit -l unlimited"]).status != 0:
            values["TOOLCREW_MEMLOCK"] = str(resource.getrlimit(resource.RLIMIT_MEMLOCK)[1])
        self.env_file = folder / "compose.env"
        self.env_file.touch(mode=0o600)
        self.env_file.write_text("".join(f"{key}={value}\n" for key, value in values.items()))
        self._command = [*compose, "--env-file", str(self.env_file)]
        self._environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("TOOLCREW_", "COMPOSE_", "OPENAI_"))
        }

    def compose(self, *arguments: str, timeout_s: float = ANSWER_S) -> CommandResult:
        return run([*self._command, *arguments], timeout_s, self._environment)

    def execute(self, service: str, *argv: str) -> CommandResult:
        """Run a command in a service's container, as the container's user."""
        (container,) = self.list_left("container", service)
        return run(["docker", "exec", container, *argv])

    def up(self) -> None:
        completed = self.compose("up", "-d", "--no-build", timeout_s=UP_S)
        assert completed.status == 0, f"{completed.err[-2000:]}\n{self.log_tails()}"
        until = time.monotonic() + HEALTHY_S
        while (states := self.states()) != dict.fromkeys(SERVICES, "healthy"):
            assert time.monotonic() < until, f"{states} after {HEALTHY_S:g} s\n{self.log_tails()}"
            time.sleep(0.5)

    def states(self) -> dict[str, str]:
        """Return service -> health of the existing containers."""
        form = (
            '{{index .Config.Labels "com.docker.compose.service"}} {{if .State.Health}}{{.State.Health.Status}}{{end}}'
        )
        containers = self.list_left("container")
        if not containers:
            return {}
        lines = run_well(["docker", "inspect", "--format", form, *containers]).splitlines()
        return {service: health for service, _, health in (line.partition(" ") for line in lines)}

    def list_left(self, kind: str, service: str = "") -> list[str]:
        """Return the ids of the project's containers (of one service), networks or volumes in the engine."""
        options = ["--all"] if kind == "container" else []
        options += ["--filter", f"label=com.docker.compose.project={self.name}"]
        options += ["--filter", f"label=com.docker.compose.service={service}"] if service else []
        return run_well(["docker", kind, "ls", "--quiet", *options]).split()

    def list_containers(self) -> list[str]:
        """Return the ids of containers that the project's sandboxd created in the engine."""
        label = f"label=toolcrew.sandboxd={self.name}"
        return run_well(["docker", "container", "ls", "--all", "--quiet", "--filter", label]).split()

    def list_sandboxes(self) -> set[str]:
        """Return the ids of sandboxes that the project's sandboxd started itself. Only root sees them."""
        found = set()
        for place in (FOLDER / "sandboxes").glob("[!.]*"):
            with contextlib.suppress(FileNotFoundError, ValueError):  # another test makes or removes it now
                labels = json.loads((place / "labels.json").read_text(encoding="utf-8"))["labels"]
                found |= {place.name} if labels.get("toolcrew.sandboxd") == self.name else set()
        return found

    def list_disks(self) -> list[str]:
        """Return the images that loop devices of the host hold for the project's sandboxd."""
        files = Path("/sys/block").glob("loop*/loop/backing_file")
        return [text for file in files if f"/{self.name}/" in (text := file.read_text(encoding="utf-8"))]

    def open_client(self) -> httpx.Client:
        """Return a client of the API with a key of the default tenant."""
        made = json.loads(self.execute("api", "toolcrew", "keys", "create", "default", "--json").out)
        headers = {"Authorization": f"Bearer {made['key']}"}
        return httpx.Client(base_url=f"http://127.0.0.1:{self.api_port}", headers=headers, timeout=ANSWER_S)

    def worker_ends(self) -> tuple[str, int, int]:
        """Return the state, the exit code and the restart count of the worker's container."""
        (container,) = self.list_left("container", "worker")
        form = "{{.State.Status}} {{.State.ExitCode}} {{.RestartCount}}"
        state, code, again = run_well(["docker", "inspect", "--format", form, container]).split()
        return state, int(code), int(again)

    def log_tails(self) -> str:
        """Return the end of every service's log, for the message of a failure."""
        return self.compose("logs", "--no-color", "--tail", "15").out[-6000:]

    def down(self) -> CommandResult:
        return self.compose("down", "--volumes", "--timeout", "30", timeout_s=DOWN_S)


@pytest.fixture(scope="module")
def compose_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeStack]:
    """Yield the stack, running and healthy. Afterwards the stack is removed without leftovers; a failed removal fails
    the tests.
    """
    require_engine().close()
    compose = find_compose()
    run_well(["scripts/build-services"], BUILD_S)
    compose_stack = ComposeStack(compose, tmp_path_factory.mktemp("compose"))
    try:
        compose_stack.up()
        yield compose_stack
    finally:
        ended = compose_stack.down()
    assert ended.status == 0, ended.err[-2000:]
    leftovers = {kind: compose_stack.list_left(kind) for kind in ("container", "network", "volume")} | {
        "created": compose_stack.list_containers(),
        "sandbox": sorted(compose_stack.list_sandboxes()),
        "disk": compose_stack.list_disks(),
    }
    assert not any(leftovers.values()), leftovers


def test_a_call_passes_through_the_whole_compose_stack(compose_stack: ComposeStack) -> None:
    completed = compose_stack.compose(
        "exec", "-T", "orchestrator", "toolcrew", "call", "bash_tool", "command=echo $((6*7))", "--json"
    )
    assert completed.status == 0, f"{completed.out}{completed.err}\n{compose_stack.log_tails()}"
    result = json.loads(completed.out)
    assert (result["success"], result["output"].strip()) == (True, "42")


def test_a_detached_batch_is_executed_by_the_service(compose_stack: ComposeStack) -> None:
    line = json.dumps({"id": "a", "tool": "bash_tool", "arguments": {"command": "echo $((6*7))"}})
    submit = f"cat > /tmp/in.jsonl <<'END'\n{line}\nEND\ntoolcrew batches submit /tmp/in.jsonl --detach --id composed"
    completed = compose_stack.execute("orchestrator", "sh", "-c", submit)
    assert (completed.status, completed.out.split()) == (0, ["composed"]), (
        f"{completed.err}\n{compose_stack.log_tails()}"
    )
    status = ("toolcrew", "batches", "show", "composed", "--json")
    wait_until(
        lambda: '"completed"' in compose_stack.execute("orchestrator", *status).out.split("request_counts")[0],
        ANSWER_S,
        compose_stack.log_tails,
    )
    row = json.loads(compose_stack.execute("orchestrator", "toolcrew", "batches", "export", "composed").out)
    assert (row["custom_id"], row["response"]["body"]["output"].strip()) == ("a", "42")


def test_a_host_program_opens_a_session_and_calls_a_tool_over_http(compose_stack: ComposeStack) -> None:
    with compose_stack.open_client() as client:
        session = client.post("/v1/sessions", json={}).json()["id"]
        # It uses a few milliseconds, so that a report of the usage at the same time does not take all of it.
        command = "for i in $(seq 20000); do :; done; echo $((6*7))"
        result = client.post(
            f"/v1/sessions/{session}/calls", json={"name": "bash_tool", "arguments": {"command": command}}
        ).json()
        assert (result["success"], result["output"].strip()) == (True, "42"), compose_stack.log_tails()
        # sandboxd in its container measures the sandboxes that it starts itself.
        assert min(result["usage"]["cpu_s"], result["usage"]["memory_peak_bytes"]) > 0, result
        assert client.delete(f"/v1/sessions/{session}").status_code == 204


def test_a_call_of_the_web_pool_cannot_reach_the_internal_network(compose_stack: ComposeStack) -> None:
    completed = compose_stack.execute(
        "orchestrator", "toolcrew", "call", "webfetch_tool", "url=http://redis:6379/", "--json"
    )
    result = json.loads(completed.out)
    assert result["error_code"] == "SECURITY_REFUSED", f"{completed.out}{completed.err}\n{compose_stack.log_tails()}"


@pytest.mark.parametrize("service", sorted(SERVICES - {"sandboxd"}))
def test_a_compromised_service_finds_no_engine_socket(compose_stack: ComposeStack, service: str) -> None:
    completed = compose_stack.execute(
        service, "sh", "-c", "find / -xdev -name 'docker*.sock' 2>/dev/null; ls /var/run/docker.sock /run/docker.sock"
    )
    assert (completed.status != 0, completed.out) == (True, "")


@pytest.mark.parametrize("service", sorted(SERVICES - {"sandboxd", "worker", "stream-gateway"}))
def test_only_the_worker_and_the_stream_gateway_reach_sandboxd(compose_stack: ComposeStack, service: str) -> None:
    assert compose_stack.execute(service, "ls", "/run/toolcrew/sandboxd.sock").status != 0


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_a_compromised_service_has_no_extra_capability_and_cannot_change_its_files(
    compose_stack: ComposeStack, service: str
) -> None:
    completed = compose_stack.execute(
        service, "sh", "-c", "grep -E '^(CapEff|CapBnd|NoNewPrivs):' /proc/self/status; touch /etc/x /usr/bin/x"
    )
    rights = f"{sum(1 << CAPABILITIES[name] for name in COMPOSE['services'][service].get('cap_add', [])):016x}"
    assert completed.status != 0
    assert completed.out.split() == ["CapEff:", rights, "CapBnd:", rights, "NoNewPrivs:", "1"]


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_a_service_image_contains_no_file_that_gives_rights(compose_stack: ComposeStack, service: str) -> None:
    assert scan_image(f"toolcrew-{service}:dev") == []


def test_sandboxes_have_disk_images_and_no_rights_on_the_host(compose_stack: ComposeStack) -> None:
    ask = "from toolcrew.workers.sandbox_client import SandboxClient as C; import json, os; "
    ask += "print(json.dumps(C(os.environ['TOOLCREW_SANDBOXD_SOCKET']).status()))"
    status = json.loads(compose_stack.execute("sandboxd", "python", "-c", ask).out)
    assert (status["start"], status["workspaces"]) == ("oci", {"kind": "image", "hard": True, "note": None})
    report = json.loads(
        compose_stack.execute("sandboxd", "python", "-m", "toolcrew.workers.sandboxd", "--check", "--json").out
    )
    states = {row["name"]: row["state"] for row in report["guarantees"]}
    for guarantee in ("files outlive their sandbox", "root in a sandbox is not root on the host"):
        assert states[guarantee] == "holds", report
    # crun starts the first process of a sandbox with capabilities, and drops them before it runs anything.
    expected = {(0, 0, 0, False)}
    wait_until(
        lambda: find_rights(compose_stack.list_sandboxes()) == expected, SOON_S, "no process has rights on the host"
    )


def find_rights(sandboxes: Iterable[str]) -> set[tuple[int, int, int, bool]]:
    """Return CapEff, CapPrm and CapBnd of the processes of sandboxes, and whether a process has a user of the host."""
    rights = set()
    for process in find_processes(sandboxes):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended just now
            text = Path(f"/proc/{process}/status").read_text(encoding="ascii")
            shown = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
            effective, permitted, bound = (int(shown[name], 16) for name in ("CapEff", "CapPrm", "CapBnd"))
            lowest_id = min(map(int, [*shown["Uid"].split(), *shown["Gid"].split()]))
            rights.add((effective, permitted, bound, lowest_id < FIRST_ID))
    return rights


def find_processes(sandboxes: Iterable[str]) -> set[int]:
    """Return the processes of sandboxes. A sandbox that has been removed has none."""
    found: set[int] = set()
    for sandbox in sandboxes:
        with contextlib.suppress(FileNotFoundError):
            found |= set(map(int, Cgroups().file(sandbox, "pids", "cgroup.procs").read_text().split()))
    return found


def test_files_survive_the_death_of_their_sandbox_and_of_sandboxd(compose_stack: ComposeStack) -> None:
    """Also those that root inside has changed in the image's file system, and those of forks."""
    with compose_stack.open_client() as client:
        files = {
            client.post("/v1/sessions", json={"user": user}).json()["id"]: file
            for user, file in (("sandbox", "/workspace/file"), ("root", "/etc/file"))
        }

        def call(session: str, command: str) -> str:
            body = {"name": "bash_tool", "arguments": {"command": command}}
            return str(client.post(f"/v1/sessions/{session}/calls", json=body).json().get("output", "")).strip()

        def are_kept() -> bool:
            return {call(session, f"cat {file}") for session, file in files.items()} == {"kept"}

        for session, file in files.items():
            assert call(session, f"echo kept > {file} && cat {file}") == "kept"
        for process in find_processes(compose_stack.list_sandboxes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        wait_until(are_kept, ANSWER_S, compose_stack.log_tails)
        for session, file in list(files.items()):
            forked = client.post(f"/v1/sessions/{session}/fork", json={"n": 1})
            assert forked.status_code == 201, forked.text
            files[forked.json()["sessions"][0]["id"]] = file
        wait_until(are_kept, ANSWER_S, compose_stack.log_tails)

        earlier, (container,) = compose_stack.list_sandboxes(), compose_stack.list_left("container", "sandboxd")
        assert earlier
        # Its PID 1, as seen here: all its processes end with it.
        os.kill(int(run_well(["docker", "inspect", "--format", "{{.State.Pid}}", container])), signal.SIGKILL)
        restarts = ["docker", "inspect", "--format", "{{.RestartCount}} {{.State.Health.Status}}", container]
        wait_until(lambda: run_well(restarts).split() == ["1", "healthy"], ANSWER_S, compose_stack.log_tails)
        wait_until(are_kept, ANSWER_S, compose_stack.log_tails)
        assert not earlier & compose_stack.list_sandboxes()
        assert not any(Cgroups().exists(sandbox) for sandbox in earlier)
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
        assert not [line for line in mounts.splitlines() if compose_stack.name in line or " toolcrew " in line]
        assert {client.delete(f"/v1/sessions/{session}").status_code for session in files} == {204}


def test_services_log_only_json_lines(compose_stack: ComposeStack) -> None:
    """Redis and Flower are exceptions, because they have their own log formats."""
    for service in sorted(SERVICES - {"redis", "flower"}):
        (container,) = compose_stack.list_left("container", service)
        logged = run(["docker", "logs", container])
        events = read_events(logged.err)
        assert logged.out == "", service
        assert events, service
        assert all({"timestamp", "level", "event", "service"} <= set(event) for event in events), service


def test_a_compromised_worker_cannot_connect_to_outside_addresses(compose_stack: ComposeStack) -> None:
    addresses = [find_gateway(f"{compose_stack.name}_{network}") for network in ("egress", "backend")]
    with socket.create_server(("0.0.0.0", 0), backlog=16) as listener:
        port = listener.getsockname()[1]
        # Proves that a server answers, so that the worker's failure comes from the network.
        outward = [
            compose_stack.execute(name, "python", "-c", CONNECT_PROGRAM, str(port), addresses[0])
            for name in ("orchestrator", "web-worker")
        ]
        if [completed.out.split() for completed in outward] != [["open"], ["open"]]:
            missing(
                f"this host refuses connections from its own containers, so there is nothing to compare with: {outward}"
            )
        completed = compose_stack.execute("worker", "python", "-c", CONNECT_PROGRAM, str(port), *addresses)
    assert completed.out.split() == ["closed", "closed"], completed


ASK_PROXY = """
import json, socket
proxy = socket.socket(socket.AF_UNIX)
proxy.settimeout(20)
proxy.connect("/run/toolcrew-egress/egress.sock")
rules = {"hosts": ["redis", "site.example"], "private_hosts": []}
proxy.sendall(json.dumps({"v": 1, "tenant": "t", "session": "s", "rules": rules}).encode())
proxy.sendall(b"\\nCONNECT redis:443 HTTP/1.1\\r\\n\\r\\n")
print(proxy.recv(4096).decode())
"""


def test_only_sandboxd_reaches_the_egress_proxy(compose_stack: ComposeStack) -> None:
    completed = compose_stack.execute("sandboxd", "python", "-c", ASK_PROXY)
    assert "403" in completed.out, completed
    assert "is a name of a private network" in completed.out
    for service in sorted(SERVICES - {"sandboxd", "egress"}):
        assert compose_stack.execute(service, "ls", "/run/toolcrew-egress/egress.sock").status != 0


def test_a_compromised_egress_proxy_cannot_resolve_internal_services(compose_stack: ComposeStack) -> None:
    completed = compose_stack.execute("egress", "python", "-c", "import socket; print(socket.gethostbyname('redis'))")
    assert completed.status != 0, completed.out


def find_gateway(network: str) -> str:
    """Return the host's address in a network, as containers of the network see it."""
    return run_well(["docker", "network", "inspect", "--format", "{{(index .IPAM.Config 0).Gateway}}", network]).strip()


def test_sandboxd_has_only_a_loopback_interface(compose_stack: ComposeStack) -> None:
    assert compose_stack.execute("sandboxd", "ls", "/sys/class/net").out.split() == ["lo"]


def test_redis_requires_a_password_and_services_cannot_change_its_configuration(compose_stack: ComposeStack) -> None:
    assert compose_stack.execute("redis", "redis-cli", "ping").out.startswith("NOAUTH")
    for role in ("orchestrator", "worker", "web", "flower"):
        for command in ("config set dir /tmp", "flushall", "replicaof redis 1", "keys x", "acl list"):
            shell = (
                f'REDISCLI_AUTH="$TOOLCREW_REDIS_{role.upper()}_PASSWORD" redis-cli --user {role} --no-auth-warning '
                f"{command}"
            )
            completed = compose_stack.execute("redis", "sh", "-c", shell)
            assert completed.out.startswith("NOPERM"), f"{role}: {command}: {completed}"


def test_no_service_lacked_a_redis_permission(compose_stack: ComposeStack) -> None:
    shell = 'REDISCLI_AUTH="$TOOLCREW_REDIS_ADMIN_PASSWORD" redis-cli --user admin --no-auth-warning acl log'
    text = compose_stack.execute("redis", "sh", "-c", shell).out
    # The attempts of the test above are in the log too. A refused command or key of a service would be an additional
    # entry.
    lines = text.splitlines()
    objects, users = (
        [lines[at + 1] for at, line in enumerate(lines) if line == name] for name in ("object", "username")
    )
    refused = set(zip(users, objects, strict=True))
    # `celery inspect` and Flower send CLIENT SETINFO, and go on without an answer. toolcrew's own clients do not.
    stock = {(user, "client") for user in ("worker", "web", "flower")}
    assert {name for _, name in refused - stock} <= {"config", "flushall", "replicaof", "keys", "acl"}, text


def test_no_secret_is_on_a_command_line(compose_stack: ComposeStack) -> None:
    lines = compose_stack.env_file.read_text().splitlines()
    values = [
        value for key, _, value in (line.partition("=") for line in lines) if key.endswith(("PASSWORD", "SECRET"))
    ]
    shown = "".join(
        run_well(["docker", "top", container, "-o", "pid,args"]) for container in compose_stack.list_left("container")
    )
    assert "redis-server" in shown
    assert len(values) == len(ROLES) + 2
    assert [value for value in values if value in shown] == []


def test_flower_requires_its_password(compose_stack: ComposeStack) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{compose_stack.flower_port}/api/workers")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=ANSWER_S)
    refused.value.close()
    assert refused.value.code == 401
    request.add_header(
        "Authorization", "Basic " + base64.b64encode(f"toolcrew:{compose_stack.flower_password}".encode()).decode()
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        assert set(json.load(answer)) == {"worker@worker", "web-worker@web-worker"}


KILL_WORKER = """
import contextlib, os
parents = {}
for pid in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(OSError):  # a health check that has just ended
        parents[int(pid)] = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]
os.kill(next(pid for pid, parent in parents.items() if parent == "1"), 9)
"""


def test_a_crashed_worker_restarts_and_a_drained_worker_stays_stopped(compose_stack: ComposeStack) -> None:
    starts = compose_stack.worker_ends()[2] + 1
    assert compose_stack.execute("worker", "python", "-c", KILL_WORKER).status in (0, 137)
    wait_until(lambda: compose_stack.worker_ends()[::2] == ("running", starts), ANSWER_S, compose_stack.log_tails)

    def drain() -> CommandResult | None:
        """Drain the host. Until the new worker has taken over, no worker can be drained."""
        result = compose_stack.execute("orchestrator", "toolcrew", "hosts", "list", "--json")
        queues = [
            report["queue"]
            for report in json.loads(result.out or '{"hosts": []}')["hosts"]
            if report["kind"] == "sandbox" and report["state"] == "serving"
        ]
        orders = [
            compose_stack.execute("orchestrator", "toolcrew", "hosts", "drain", queue, "--lossy", "--wait")
            for queue in queues
        ]
        return next((completed for completed in orders if completed.status == 0), None)

    wait_until(drain, UP_S, compose_stack.log_tails)
    ends = wait_until(
        lambda: (ends := compose_stack.worker_ends())[0] != "running" and ends, ANSWER_S, compose_stack.log_tails
    )
    assert ends == ("exited", 0, starts), "it was drained, and came back"
