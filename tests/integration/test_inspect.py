"""Evaluations with the real Inspect on a real pool: the example, limits observed from outside, clean-up, and an
unavailable pool.
"""

import asyncio
import io
import json
import os
import secrets
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from docker import APIClient
from inspect_ai._util.error import PrerequisiteError
from inspect_ai.util import OutputLimitExceededError, SandboxUserUnsupportedError
from inspect_ai.util._sandbox.environment import SandboxUnavailableError

from tests.support.stack.stack import Stack, commands_in, open_stack
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.errors import ConfigError
from toolcrew.orchestrator.adapters.inspect_config import ToolcrewSandboxConfig, load_config, parse_config
from toolcrew.orchestrator.adapters.inspect_sandbox import ToolcrewSandboxEnvironment
from toolcrew.orchestrator.sdk.client import ToolClient

pytestmark = pytest.mark.stack
ROOT = Path(__file__).parents[2]
RIGHT = [(3, 6, "'6'"), (40, 100, "'100'")]


@pytest.fixture
async def sandbox(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ToolcrewSandboxEnvironment]:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", stack.redis_url)
    environments = await ToolcrewSandboxEnvironment.sample_init("test", None, {})
    yield environments["default"].as_type(ToolcrewSandboxEnvironment)
    await ToolcrewSandboxEnvironment.sample_cleanup("test", None, environments, True)
    await ToolcrewSandboxEnvironment.task_cleanup("test", None, True)


async def container_of(stack: Stack, sandbox: ToolcrewSandboxEnvironment) -> str:
    await sandbox.exec(["true"])
    container = (await sandbox.session.info()).sandbox
    assert container is not None
    return stack.full_id(container.id)


async def test_the_example_scores_correctly_and_leaves_no_session(stack: Stack, tmp_path: Path) -> None:
    """The example uses files and a setup script, which Inspect writes into /tmp and runs there."""
    async with ToolClient.connect(stack.redis_url) as client:
        before = {session.id for session in (await client.sessions()).sessions}
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "examples/inspect_eval.py", str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "TOOLCREW_REDIS_URL": stack.redis_url},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert [f"sum-{last} {total} {{'sum_is_written': {value}}}" in done.stdout for last, total, value in RIGHT] == [
            True,
            True,
        ], done.stdout
        assert {session.id for session in (await client.sessions()).sessions} <= before


EVALUATION = """
import sys
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.solver import solver
from inspect_ai.util import sandbox

BASH = "/opt/toolcrew/bin/bash"

@solver
def look():
    async def solve(state, generate):
        user = (await sandbox().exec([BASH, "-c", "echo $UID"])).stdout.strip()
        root = (await sandbox().exec([BASH, "-c", "echo $UID"], user="root")).stdout.strip() if user != "1000" else "-"
        try:
            await sandbox().write_file("/etc/mine", "written")
            mine = await sandbox().read_file("/etc/mine")
        except PermissionError:
            mine = "refused"
        print("looked", state.sample_id, user, root, await sandbox().read_file("/motd"), mine, flush=True)
        return state
    return solve

samples = [Sample(id=name, input="-", sandbox=("toolcrew", name)) for name in sys.argv[2:]]
log = eval(Task(dataset=samples, solver=look()), model="mockllm/model", display="plain", log_dir=sys.argv[1])[0]
sys.exit(log.status != "success")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="root inside needs the OCI start, which needs root")
async def test_a_sample_names_an_image_or_a_config_file_and_has_root_only_if_configured(
    engine: APIClient, tmp_path: Path
) -> None:
    image = f"toolcrew-test-inspect:{secrets.token_hex(4)}"
    tree = io.BytesIO()
    with tarfile.open(fileobj=tree, mode="w") as archive:
        member = tarfile.TarInfo("motd")
        member.size = 5
        archive.addfile(member, io.BytesIO(b"hello"))
    repository, _, tag = image.partition(":")
    engine.import_image_from_data(tree.getvalue(), repository=repository, tag=tag)
    file = tmp_path / "rooted.yaml"
    file.write_text(f"image: {image}\nuser: root\n")
    settings = {
        "TOOLCREW_TENANT_CLASSES": json.dumps({"default": {"largest": {"user": "root"}}}),
        "TOOLCREW_SANDBOX_IMAGES_ALLOWED": json.dumps([image]),
    }
    try:
        with open_stack(engine, settings) as opened:
            done = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-c", EVALUATION, str(tmp_path), image, str(file)],
                env={**os.environ, "TOOLCREW_REDIS_URL": opened.redis_url},
                capture_output=True,
                text=True,
                timeout=100,
            )
    finally:
        engine.remove_image(image, force=True)
    assert done.returncode == 0, done.stdout + done.stderr
    looked = sorted(line.removeprefix("looked ") for line in done.stdout.splitlines() if line.startswith("looked "))
    assert looked == [f"{file} 0 0 hello written", f"{image} 1000 - hello refused"]


async def test_at_the_limit_all_processes_are_killed_and_the_output_is_reported(
    stack: Stack, sandbox: ToolcrewSandboxEnvironment
) -> None:
    container = await container_of(stack, sandbox)
    with pytest.raises(TimeoutError) as raised:
        await sandbox.exec(["bash", "-c", "echo x >>runs; echo begun; setsid sleep 300 & sleep 300"], timeout=1)
    assert getattr(raised.value, "truncated_output", None) == "begun\n"
    await wait_until_async(lambda: len(commands_in(container)) == 1, SOON_S, "only the guest is left in the container")
    assert await sandbox.read_file("runs") == "x\n", "it was begun once, though timeout_retry is on"


async def test_output_above_the_limit_is_an_error_with_a_part_of_it(sandbox: ToolcrewSandboxEnvironment) -> None:
    with pytest.raises(OutputLimitExceededError) as raised:
        await sandbox.exec(["head", "-c", "6000000", "/dev/zero"])
    assert raised.value.truncated_output


async def test_a_missing_program_is_a_failed_result_and_another_user_is_refused(
    sandbox: ToolcrewSandboxEnvironment,
) -> None:
    missing = await sandbox.exec(["no-such-program"])
    assert (missing.success, missing.returncode) == (False, 127)
    assert "no-such-program" in missing.stderr
    assert (await sandbox.exec(["id", "-u"], user="1000")).stdout == "1000\n"
    with pytest.raises(SandboxUserUnsupportedError):
        await sandbox.exec(["id", "-u"], user="root")


async def test_image_files_can_be_read_and_not_written(sandbox: ToolcrewSandboxEnvironment) -> None:
    assert "root:" in await sandbox.read_file("/etc/passwd")
    with pytest.raises(FileNotFoundError):
        await sandbox.read_file("/etc/no-such-file")
    with pytest.raises(PermissionError):
        await sandbox.write_file("/etc/passwd", "mine")
    await sandbox.write_file("bytes", b"\xff\r\n")
    with pytest.raises(UnicodeDecodeError):
        await sandbox.read_file("bytes")


async def test_the_connection_is_a_command_and_ends_with_the_session(
    stack: Stack, sandbox: ToolcrewSandboxEnvironment
) -> None:
    await sandbox.write_file("seen-here", "")
    connection = await sandbox.connection()
    ran = await asyncio.to_thread(
        subprocess.run,
        [str(Path(sys.executable).parent / "toolcrew"), *connection.command.split()[1:]],
        env={**os.environ, "TOOLCREW_REDIS_URL": stack.redis_url},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "seen-here" in ran.stdout, ran.stderr
    await sandbox.session.close()
    with pytest.raises(ConnectionError):
        await sandbox.connection()
    with pytest.raises(SandboxUnavailableError):
        await sandbox.exec(["true"])


async def test_an_interrupted_sample_and_the_end_of_a_task_remove_sandboxes(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", stack.redis_url)
    config = ToolcrewSandboxConfig(ttl_s=600)
    await ToolcrewSandboxEnvironment.task_init("test", config)
    samples = [await ToolcrewSandboxEnvironment.sample_init("test", config, {}) for _ in range(2)]
    containers = [
        await container_of(stack, sample["default"].as_type(ToolcrewSandboxEnvironment)) for sample in samples
    ]
    await ToolcrewSandboxEnvironment.sample_cleanup("test", config, samples[0], True)
    assert [stack.has_container(container) for container in containers] == [False, True]
    await ToolcrewSandboxEnvironment.task_cleanup("test", config, True)
    assert not stack.has_container(containers[1])


async def test_a_leftover_sandbox_is_removed_from_the_command_line(
    stack: Stack, sandbox: ToolcrewSandboxEnvironment
) -> None:
    container = await container_of(stack, sandbox)
    with pytest.raises(PrerequisiteError):
        await ToolcrewSandboxEnvironment.cli_cleanup(None)
    assert stack.has_container(container)
    await ToolcrewSandboxEnvironment.cli_cleanup(sandbox.session.id)
    assert not stack.has_container(container)


async def test_without_a_pool_the_task_does_not_start_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLCREW_REDIS_URL", raising=False)
    with pytest.raises(PrerequisiteError) as unset:
        await ToolcrewSandboxEnvironment.task_init("test", None)
    assert "set TOOLCREW_REDIS_URL" in str(unset.value.message)
    monkeypatch.setenv("TOOLCREW_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("TOOLCREW_SECRET", "a" * 40)
    with pytest.raises(PrerequisiteError) as away:
        await ToolcrewSandboxEnvironment.task_init("test", None)
    assert "127.0.0.1:1" in str(away.value.message)


def test_a_configuration_is_a_file_or_a_mapping_and_unknown_fields_are_named(tmp_path: Path) -> None:
    file = tmp_path / "toolcrew.yaml"
    file.write_text("network: none\nttl_s: 60\n")
    assert load_config(str(file)) == ToolcrewSandboxConfig(network="none", ttl_s=60)
    assert load_config("ghcr.io/team/image:v1") == ToolcrewSandboxConfig(image="ghcr.io/team/image:v1")
    with pytest.raises(ConfigError, match=r"`imagine` .*image, network, tenant, ttl_s"):
        parse_config({"imagine": "x"})
