"""Measure a program in a sandbox of an Inspect evaluation, in three ways.

The ways are toolcrew's provider, Inspect's own Docker provider, and the command that Inspect's provider runs in the
end. Both providers are driven as Inspect drives them, on the same image. Inspect's provider needs `docker compose`
2.24 or later as a plugin of the docker command; the plugin can be in a folder that DOCKER_CONFIG names. Without the
plugin the report shows only the command, which is a part of the provider's work.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from inspect_ai._util.error import PrerequisiteError
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.docker import docker as docker_provider
from inspect_ai.util._sandbox.docker.docker import DockerSandboxEnvironment
from inspect_ai.util._sandbox.docker.prereqs import validate_docker_compose, validate_docker_engine

from benchmarks.processes import environment
from benchmarks.report import Report, interleave, median
from benchmarks.sizes import size
from benchmarks.whole_path import awaited
from toolcrew import ToolClient
from toolcrew.orchestrator.adapters.inspect_sandbox import ToolcrewSandboxEnvironment

ROUNDS, WARM_UP = size((30, 3), (2, 1))
IMAGE = "toolcrew-sandbox:dev"
TASK = "bench"
CONTENT = "a line\n" * 100
AT_LEAST = 5.0
Provider = type[ToolcrewSandboxEnvironment] | type[DockerSandboxEnvironment]


def run() -> Report:
    return asyncio.run(_run())


async def _run() -> Report:
    report = Report("inspect_exec", notes=[f"medians of {ROUNDS} interleaved rounds; both on {IMAGE}, without network"])
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(ToolClient.embedded(workers_only=True))
        assert client.stack is not None
        stack.enter_context(environment({"TOOLCREW_REDIS_URL": client.stack.redis_url}))
        container = await stack.enter_async_context(_container())
        ours, ours_s = await stack.enter_async_context(_sample(ToolcrewSandboxEnvironment, None))
        cases: dict[str, Callable[[], Awaitable[float]]] = {
            "command": awaited(lambda: _docker_exec(container)),
            "ours": awaited(lambda: _exec(ours)),
            "ours_files": awaited(lambda: _files(ours)),
        }
        report.add("ours_sandbox_ms", ours_s * 1000, "a sample's sandbox, ours")
        if await _has_compose(report):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            theirs, theirs_s = await stack.enter_async_context(_sample(DockerSandboxEnvironment, _compose_file(folder)))
            report.add("theirs_sandbox_ms", theirs_s * 1000, "the same, Inspect's docker provider")
            cases |= {"theirs": awaited(lambda: _exec(theirs)), "theirs_files": awaited(lambda: _files(theirs))}
        seconds = await interleave(cases, ROUNDS, WARM_UP)
    report.add_ms("command", seconds["command"], "part of the peer: `docker exec true`, the command alone")
    report.add_ms("ours", seconds["ours"], "sandbox().exec(['true']), ours")
    report.add("command_ratio", median(seconds["command"]) / median(seconds["ours"]), "the command alone / ours")
    if "theirs" in seconds:
        report.add_ms("theirs", seconds["theirs"], "the same, Inspect's docker provider")
        report.add(
            "exec_ratio", median(seconds["theirs"]) / median(seconds["ours"]), "theirs / ours", at_least=AT_LEAST
        )
        report.add_ms("ours_files", seconds["ours_files"], "write_file and read_file of 700 bytes, ours")
        report.add_ms("theirs_files", seconds["theirs_files"], "the same, Inspect's docker provider")
    return report


async def _has_compose(report: Report) -> bool:
    try:
        await validate_docker_compose("2.24.0")
    except PrerequisiteError as error:
        report.notes.append(
            "Inspect's docker provider was left out: install docker compose 2.24 or later "
            f"({str(error).splitlines()[0][:100]})"
        )
        return False
    try:
        await validate_docker_engine()
    except PrerequisiteError:
        # The measured functions also work on older engines. The provider checks the version only before it starts.
        report.notes.append("the engine is older than Inspect's docker provider asks for: its question was left out")
        docker_provider.validate_prereqs = _ask_nothing  # type: ignore[attr-defined]
    return True


async def _ask_nothing() -> None:
    """Do nothing. This function replaces the provider's check of versions, which does not affect the measurement."""


@contextlib.asynccontextmanager
async def _sample(provider: Provider, config: str | None) -> AsyncIterator[tuple[SandboxEnvironment, float]]:
    """Yield the sandbox of one sample, and the seconds until the sandbox was ready."""
    await provider.task_init(TASK, config)
    try:
        began = time.perf_counter()
        environments = await provider.sample_init(TASK, config, {})
        took = time.perf_counter() - began
        try:
            yield environments["default"], took
        finally:
            await provider.sample_cleanup(TASK, config, environments, False)
    finally:
        await provider.task_cleanup(TASK, config, True)


def _compose_file(folder: Path) -> str:
    path = folder / "compose.yaml"
    service = {
        "image": IMAGE,
        "entrypoint": ["sleep", "infinity"],
        "network_mode": "none",
        "working_dir": "/tmp",
        "x-local": True,
    }
    path.write_text(json.dumps({"services": {"default": service}}))
    return str(path)


@contextlib.asynccontextmanager
async def _container() -> AsyncIterator[str]:
    """Start a container for the command alone and yield its id."""
    made = await asyncio.to_thread(
        subprocess.run,
        ["docker", "run", "-d", "--rm", "--network", "none", "--entrypoint", "sleep", IMAGE, "infinity"],
        capture_output=True,
        text=True,
        check=True,
    )
    try:
        yield made.stdout.strip()
    finally:
        await asyncio.to_thread(
            subprocess.run, ["docker", "kill", made.stdout.strip()], capture_output=True, check=False
        )


async def _exec(sandbox: SandboxEnvironment) -> None:
    done = await sandbox.exec(["true"])
    if not done.success:
        raise RuntimeError(f"the program did not run: {done}")


async def _files(sandbox: SandboxEnvironment) -> None:
    await sandbox.write_file("note.txt", CONTENT)
    if await sandbox.read_file("note.txt") != CONTENT:
        raise RuntimeError("the file is not what was written")


async def _docker_exec(container: str) -> None:
    process = await asyncio.create_subprocess_exec("docker", "exec", container, "true", env=dict(os.environ))
    if await process.wait() != 0:
        raise RuntimeError("docker exec failed")
