"""The `toolcrew` command as users type it: output, exit codes, and leftovers after an interruption."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis.asyncio
from docker import APIClient

from tests.support.cli.command_server import run_toolcrew
from tests.support.stack.stack import TOOLCREW, Footprint, Stack, commands_in, end_process, open_stack, read_line
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.contract.calls import ToolResult
from toolcrew.orchestrator.operations.local_stack import StackInfo
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.store.hosts import HostStore
from toolcrew.workers.reports import has_surely_ended

pytestmark = pytest.mark.stack

Done = subprocess.CompletedProcess[str]


class Shell:
    """A user's shell in which TOOLCREW_REDIS_URL names the shared stack."""

    def __init__(self, stack: Stack, footprint: Footprint) -> None:
        self.stack = stack
        self.footprint = footprint
        self.environment = {"TOOLCREW_REDIS_URL": stack.redis_url}

    def toolcrew(self, *arguments: str, text: str = "", **environment: str) -> Done:
        return run_toolcrew(self.footprint, *arguments, environment={**self.environment, **environment}, text=text)


def read_terminal(command: list[str], environment: dict[str, str]) -> str:
    """Return what a command prints when its stdout is a terminal."""
    terminal, stdout = os.openpty()
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.DEVNULL
    )
    os.close(stdout)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the command has ended
        while piece := os.read(terminal, 4096):
            shown += piece
    os.close(terminal)
    process.wait(60)
    return shown.decode()


@pytest.fixture
def shell(stack: Stack, footprint: Footprint) -> Iterator[Shell]:
    before = stack.footprint.containers()
    yield Shell(stack, footprint)
    wait_until(lambda: set(stack.footprint.containers()) <= set(before), SOON_S, "every command has closed its session")


def test_call_prints_output_on_stdout_and_timings_on_stderr(shell: Shell) -> None:
    done = shell.toolcrew("call", "bash_tool", "command=echo hello; echo there >&2")

    assert done.returncode == 0
    assert sorted(done.stdout.split()) == ["hello", "there"]
    assert "run" in done.stderr
    assert "Traceback" not in done.stderr


def test_call_with_json_prints_the_result_as_one_object(shell: Shell) -> None:
    done = shell.toolcrew("call", "bash_tool", "command=exit 4", "--json")

    result = ToolResult.model_validate_json(done.stdout)
    assert (done.returncode, result.success, result.metadata["exit_code"]) == (4, True, 4)
    assert done.stderr == ""


def test_call_exits_with_4_when_the_command_fails(shell: Shell) -> None:
    failed = shell.toolcrew("call", "bash_tool", "command=exit 3")
    killed = shell.toolcrew("call", "bash_tool", "command=kill -9 $$")

    assert (failed.returncode, "the command ended with exit code 3" in failed.stderr) == (4, True), failed.stderr
    assert (killed.returncode, "the command ended with " in killed.stderr) == (4, True), killed.stderr


def test_call_reports_an_unknown_session(shell: Shell) -> None:
    done = shell.toolcrew("call", "bash_tool", "command=true", "--session", "nope")

    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no such session: this tenant has no open session of that name" in done.stderr


def test_call_converts_arguments_by_the_schema_and_keeps_equal_signs(shell: Shell) -> None:
    done = shell.toolcrew("call", "bash_tool", "command=echo a=b=c; sleep 20", "timeout=0.5", "--json")

    result = ToolResult.model_validate_json(done.stdout)
    assert (done.returncode, result.error_code, result.metadata["stdout"]) == (1, "TIMEOUT", "a=b=c\n")


def test_call_uses_the_named_tenant_or_the_tenant_of_its_api_key(shell: Shell) -> None:
    assert shell.toolcrew("tenants", "add", "acme-cli", "--tools", "bash_tool").returncode == 0
    try:
        named = shell.toolcrew("call", "write_tool", "file_path=a", "content=b", "--tenant", "acme-cli", "--json")
        key = shell.toolcrew("keys", "create", "acme-cli").stdout.strip()
        keyed = shell.toolcrew("call", "write_tool", "file_path=a", "content=b", "--json", TOOLCREW_API_KEY=key)
        allowed = shell.toolcrew("call", "bash_tool", "command=echo mine", TOOLCREW_API_KEY=key)
        others = shell.toolcrew("call", "bash_tool", "command=true", "--tenant", "elsewhere", TOOLCREW_API_KEY=key)
        homeless = shell.toolcrew("call", "bash_tool", "command=true", TOOLCREW_API_KEY=key, TOOLCREW_REDIS_URL="")
    finally:
        assert shell.toolcrew("tenants", "remove", "acme-cli").returncode == 0
    assert [json.loads(done.stdout)["error_code"] for done in (named, keyed)] == ["PERMISSION_DENIED"] * 2
    assert (allowed.returncode, allowed.stdout.strip()) == (0, "mine")
    assert (others.returncode, homeless.returncode, "TOOLCREW_REDIS_URL" in homeless.stderr) == (3, 1, True)
    assert key.split("_", 2)[2] not in others.stderr + homeless.stderr


def test_call_reads_arguments_from_a_file_and_from_stdin(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "arguments.json"
    file.write_text(json.dumps({"command": "echo from a file"}))

    by_file = shell.toolcrew("call", "bash_tool", f"@{file}")
    by_stdin = shell.toolcrew("call", "bash_tool", "-", text=json.dumps({"command": "cat", "stdin": "from stdin 尺寸"}))

    assert by_file.stdout.strip() == "from a file"
    assert by_stdin.stdout.strip() == "from stdin 尺寸"


def test_call_of_an_unknown_tool_suggests_similar_names(shell: Shell) -> None:
    done = shell.toolcrew("call", "bash_tol", "x=1")

    assert done.returncode == 1
    assert "Tool not found: bash_tol; similar names: bash_tool" in done.stderr
    assert done.stdout == ""


def test_call_escapes_terminal_control_sequences(shell: Shell) -> None:
    command = [TOOLCREW, "call", "bash_tool", r"command=printf '\033[31mred\033]0;title\007'"]
    shown = read_terminal(command, shell.footprint.environment(shell.environment))

    assert "red" in shown
    assert "\x1b[31m" not in shown
    assert "\x07" not in shown


def test_call_without_a_stack_starts_one_and_stops_it(footprint: Footprint) -> None:
    done = run_toolcrew(footprint, "call", "bash_tool", "command=echo alone")

    assert (done.returncode, done.stdout.strip()) == (0, "alone")
    assert "starting an embedded stack" in done.stderr
    footprint.assert_nothing_left(within_s=1)


@pytest.mark.parametrize("has_stack", [True, False], ids=["on a running stack", "with a stack of its own"])
def test_ctrl_c_in_a_call_ends_the_command_and_leaves_nothing(
    stack: Stack, footprint: Footprint, has_stack: bool
) -> None:
    watched = stack.footprint if has_stack else footprint
    environment = footprint.environment({"TOOLCREW_REDIS_URL": stack.redis_url} if has_stack else None)
    process = subprocess.Popen(
        [TOOLCREW, "call", "bash_tool", "command=sleep 60"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(
            lambda: any("sleep 60" in commands_in(c).values() for c in watched.containers()), SOON_S, "the command runs"
        )
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=40)
    finally:
        process.kill()
        process.wait()

    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in out + err
    assert not any("sleep 60" in commands_in(container).values() for container in watched.containers())
    footprint.assert_nothing_left(within_s=1)
    assert watched.containers() == []


def test_a_terminated_call_closes_its_session_on_a_running_stack(stack: Stack, footprint: Footprint) -> None:
    """`timeout 10 toolcrew call ...`, or a supervisor, stops the command. The session must not occupy the shared pool
    for half an hour.
    """
    process = subprocess.Popen(
        [TOOLCREW, "call", "bash_tool", "command=sleep 61"],
        env=footprint.environment({"TOOLCREW_REDIS_URL": stack.redis_url}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(
            lambda: any("sleep 61" in commands_in(c).values() for c in stack.footprint.containers()),
            SOON_S,
            "the command runs",
        )
        process.terminate()
        process.wait(20)
    finally:
        process.kill()
        process.wait()
    leftovers = stack.footprint.containers()
    for container in leftovers:
        stack.api.remove_container(container, force=True)
    assert leftovers == []


def test_doctor_reports_what_is_missing_and_how_to_fix_it(footprint: Footprint) -> None:
    no_engine = run_toolcrew(footprint, "doctor", environment={"DOCKER_HOST": "unix:///nonexistent.sock"})
    no_image = run_toolcrew(
        footprint, "doctor", "--json", environment={"TOOLCREW_SANDBOX_IMAGE": "toolcrew-sandbox:no"}
    )
    no_redis = run_toolcrew(
        footprint, "doctor", "--json", environment={"TOOLCREW_REDIS_URL": "redis://:x@127.0.0.1:1/0"}
    )

    assert (no_engine.returncode, no_image.returncode, no_redis.returncode) == (1, 1, 1)
    assert "FAIL" in no_engine.stdout
    assert "start it" in no_engine.stdout
    assert "scripts/build-image" in no_image.stdout
    assert [f["is_good"] for f in json.loads(no_redis.stdout)["findings"] if f["name"] == "redis"] == [False]
    footprint.assert_nothing_left(within_s=2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_prints_its_addresses_on_one_line_and_stops_everything_on_a_signal(engine: APIClient, number: int) -> None:
    with open_stack(engine, workers_only=False) as stack:
        assert isinstance(stack.info, StackInfo)
        assert set(stack.info.pids) == {
            "redis",
            "sandboxd",
            "worker",
            "web",
            "stream-gateway",
            "flower",
            "api",
            "orchestrator",
        }
        running = stack.footprint.processes()
        assert {pid for pids in stack.info.pids.values() for pid in pids} <= set(running)

        assert stack.end(number) == 0

        assert stack.process.stdout is not None
        assert stack.process.stdout.read() == b""
        assert stack.errors() == ""
        stack.footprint.assert_nothing_left(within_s=1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_stack_that_starts_again_at_once_is_ready_when_it_says_so(
    engine: APIClient, tmp_path: Path, number: int
) -> None:
    options = ["--data", str(tmp_path / "data")]
    with open_stack(engine, options=options) as stack:
        stack.end(number)
        wait_until(lambda: not stack.footprint.processes(), SOON_S, "the processes of the stack end")
    with open_stack(engine, options=options) as stack:
        # The workers of the last stack still count as alive, and their queues take calls that no process runs.
        async with ToolClient.connect(stack.redis_url) as client:
            redis_client = redis.asyncio.Redis.from_url(stack.redis_url)
            reports = await HostStore(redis_client, stack.info.deployment).read()
            await redis_client.aclose()
            assert {report.kind for report in reports if report.worker and not has_surely_ended(report.process)} == {
                "sandbox",
                "web",
            }
            async with await client.open_session() as session:
                assert (await session.exec(["echo", "here"])).stdout == b"here\n"


def test_up_with_a_data_folder_keeps_tenants_and_keys_when_it_is_killed(engine: APIClient, tmp_path: Path) -> None:
    port = reserve_port()
    options = ["--data", str(tmp_path / "data"), "--port", str(port)]
    with open_stack(engine, options=options, workers_only=False) as stack:
        api = httpx.Client(
            base_url=f"http://127.0.0.1:{port}/v1",
            headers={"Authorization": f"Bearer {stack.info.api_key}"},
            timeout=60,
        )
        with api:
            api.post("/tenants", json={"name": "acme"}).raise_for_status()
            key = api.post("/tenants/acme/keys", json={}).raise_for_status().json()["key"]
            api.post("/sessions", json={}).raise_for_status()
            upload = api.post("/files", content=b"PK\x05\x06" + bytes(18)).raise_for_status().json()
        stack.end(signal.SIGKILL)
        wait_until(lambda: not stack.footprint.processes(), SOON_S, "the processes of the killed stack end")

    with open_stack(engine, options=options, workers_only=False) as stack:
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/tools", headers={"Authorization": f"Bearer {key}"}, timeout=60)
        assert answer.status_code == 200
        headers = {"Authorization": f"Bearer {stack.info.api_key}"}
        sessions = httpx.get(f"http://127.0.0.1:{port}/v1/sessions", headers=headers, timeout=60)
        assert sessions.json()["data"] == []
        restored = httpx.post(
            f"http://127.0.0.1:{port}/v1/runs",
            headers=headers,
            json={"instruction": "Say hello.", "model": "scripted", "workspace": upload["id"]},
            timeout=60,
        )
        assert restored.status_code == 202, restored.text
        assert stack.end() == 0
        stack.footprint.assert_nothing_left(within_s=1)


@pytest.mark.parametrize(
    ("number", "end"), [(signal.SIGHUP, ""), (signal.SIGINT, "API keys, runs and batches are deleted\n")]
)
def test_up_in_text_mode_prints_usage_and_stops_with_its_terminal(footprint: Footprint, number: int, end: str) -> None:
    process = subprocess.Popen(
        [TOOLCREW, "up", "--workers-only"],
        env=footprint.environment({"PYTHONUNBUFFERED": "1"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        first = read_line(process)
        process.send_signal(number)
        rest, errors = process.communicate(timeout=40)
    finally:
        end_process(process)

    assert errors.decode().endswith(end)
    assert errors.count(b"\n") == end.count("\n")
    text = (first + rest).decode()
    assert "Ctrl-C stops it" in text
    assert "Ctrl-C also deletes its tenants, API keys, runs and batches" in text
    assert "export TOOLCREW_REDIS_URL=" in text
    assert "toolcrew call bash_tool" in text
    # --workers-only starts neither of the two.
    assert "Flower" not in text
    assert "  API " not in text
    footprint.assert_nothing_left(within_s=1)


def test_run_executes_an_instruction_to_its_answer(shell: Shell, tmp_path: Path) -> None:
    """tests/integration/test_agent_runs.py has every dialect."""
    workspace, saved = tmp_path / "in", tmp_path / "out"
    workspace.mkdir()
    (workspace / "numbers.txt").write_text("1\n2\n39\n")

    done = shell.toolcrew(
        "run",
        "What is the sum of the numbers in /workspace/numbers.txt?",
        "--workspace",
        str(workspace),
        "--save-workspace",
        str(saved),
        "--model",
        "scripted",
        "--json",
    )

    assert done.returncode == 0, done
    result = json.loads(done.stdout)
    assert "42" in result["answer"]
    assert (result["stop_reason"], result["steps"]) == ("answered", 2)
    assert (saved / "numbers.txt").read_text() == "1\n2\n39\n"


@pytest.mark.parametrize(
    ("rules", "code", "output"),
    [("", 2, '"stop_reason"'), ('{"action": "deny", "argv_prefix": ["awk"]}', 3, "SECURITY_REFUSED")],
)
def test_run_exits_with_2_at_its_limit_and_with_3_when_its_call_was_refused(
    shell: Shell, tmp_path: Path, rules: str, code: int, output: str
) -> None:
    (tmp_path / "policy.json").write_text(f'{{"rules": [{rules}]}}')
    (tmp_path / "numbers.txt").write_text("1\n")
    options = ["--workspace", str(tmp_path), "--model", "scripted"]
    limit = [] if rules else ["--max-iterations", "1", "--json"]
    policy = {"TOOLCREW_APPROVAL_POLICY": str(tmp_path / "policy.json")} if rules else {}

    done = shell.toolcrew("run", "sum /workspace/numbers.txt", *options, *limit, **policy)

    assert done.returncode == code, done
    assert output in done.stdout
    assert '"answered"' not in done.stdout
