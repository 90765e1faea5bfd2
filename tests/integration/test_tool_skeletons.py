"""A package as `toolcrew tools new` writes it: installed, tested by itself, loaded, and called through a real worker
beside the stack.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.errors import ErrorCode
from contract.names import catalog_key
from orchestrator.sdk.client import ToolClient
from tests.stack import ROOT, Stack, run_toolcrew, wait_until

pytestmark = pytest.mark.stack

TABLE = "fruit,pieces\napple,3\npear,4\n"


@pytest.fixture(scope="module")
def package(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the package."""
    folder = tmp_path_factory.mktemp("skeleton")
    made = run_toolcrew(stack.footprint, "tools", "new", "sum_column", "--dir", str(folder))
    assert made.returncode == 0, made.stderr
    return folder / "sum_column"


@pytest.fixture(scope="module")
def installed(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the package in it, beside what this one has."""
    place = tmp_path_factory.mktemp("environment")
    # Its build backend and toolcrew are here: nothing has to be fetched.
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(place)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(package)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture(scope="module")
def served(stack: Stack, installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A worker that has the environment serves its tools."""
    settings = {
        "PYTHONPATH": str(installed),
        "TOOLCREW_REDIS_URL": stack.redis_url,
        "TOOLCREW_WORKER_KIND": "web",
        "TOOLCREW_WORKER_QUEUES": '["pool.tools"]',
        "TOOLCREW_HOST": "skeletons",
        "TOOLCREW_CONCURRENCY": "1",
    }
    log, key = tmp_path_factory.mktemp("log") / "worker.log", catalog_key("default", "tools")
    with log.open("wb") as out, stack.open_redis() as store:
        worker = subprocess.Popen(
            [sys.executable, "-m", "workers"], env=stack.footprint.environment(settings), stdout=out, stderr=out
        )
        try:
            wait_until(lambda: store.exists(key) or worker.poll() is not None, 60, "the worker is ready")
            assert worker.poll() is None, log.read_text()
            yield
        finally:
            worker.kill()
            worker.wait()
            # Who comes next on this stack finds it as it was.
            store.delete(key)


def test_its_own_tests_pass_against_what_is_installed(package: Path, installed: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--override-ini", "pythonpath="],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


def test_its_code_is_clean_by_linter_and_type_checker(package: Path) -> None:
    ruff = [
        str(Path(sys.executable).parent / "ruff"),
        "check",
        "--isolated",
        "--no-cache",
        "--select",
        "E,F,I,B,UP",
        "--line-length",
        "160",
        ".",
    ]
    mypy = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-incremental",
        "--config-file",
        os.devnull,
        str(package / "sum_column.py"),
    ]
    for command, folder in ((ruff, package), (mypy, ROOT)):
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
        assert done.returncode == 0, done.stdout


def test_the_loader_of_workers_finds_it_by_its_entry_point(installed: Path) -> None:
    code = (
        "from workers.custom.loading import load_custom_tools as load; print([(one.name, one.spec.pool, "
        "one.spec.timeout_s) for one in load()])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{installed}:{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[('sum_column', 'tools', 10.0)]"


async def test_a_real_worker_serves_it_as_its_tests_say(stack: Stack, served: None) -> None:
    async with ToolClient.connect(stack.redis_url) as client, await client.open_session() as session:
        assert "sum_column" in {spec.name for spec in await client.tools()}
        summed = await session.call("sum_column", {"table": TABLE, "column": "pieces"})
        missing = await session.call("sum_column", {"table": TABLE, "column": "price"})
        blank = await session.call("sum_column", {"table": " ", "column": "pieces"})
    assert json.loads(summed.output or "") == {"numbers": 2, "sum": 7.0}
    assert (missing.error_code, missing.error) == (
        ErrorCode.NO_MATCH,
        "there is no column 'price': the columns are fruit, pieces",
    )
    assert (blank.error_code, blank.error) == (
        ErrorCode.INVALID_ARGUMENTS,
        "sum_column: give a table with at least one line",
    )
