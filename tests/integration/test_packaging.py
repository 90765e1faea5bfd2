"""The installed wheel: complete, sufficient with each extra alone, and with a clear error where an extra is missing."""

import json
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RedisProcess
from tests.support.cli.installed import ROOT, Installed, build_wheel, make_environment, unpack_wheel
from tests.support.stack.log_lines import read_start_error
from tests.support.stack.stack import require_engine
from toolcrew.contract.extras import EXTRAS, explain_missing

# Printed as JSON: module -> the missing package.
IMPORT = """
import importlib, json, sys
lacks = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except Exception as error:
        # Adapters say it in words of their own.
        missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        if not isinstance(missing, ModuleNotFoundError):
            raise
        lacks[name] = missing.name
print(json.dumps(lacks))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_wheel(wheel, tmp_path_factory.mktemp("unpacked"))


@pytest.fixture(scope="module")
def bare(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Return an environment without any extra."""
    return make_environment(tmp_path_factory.mktemp("bare") / "venv", unpacked, ())


def read_extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    return {name: packages for name, packages in extras.items() if name != "dev"}


def source_files() -> Iterator[str]:
    yield from ("toolcrew/__init__.py", "toolcrew/celery.py")
    yield "toolcrew/py.typed"
    folders = {f"toolcrew/{link.name}": link.resolve() for link in (ROOT / "toolcrew").iterdir() if link.is_symlink()}
    for name, folder in {**folders, "toolcrew/workers/shipped_skills": ROOT / "skills"}.items():
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{name}/{path.relative_to(folder).as_posix()}"


def find_lacks(installed: Installed, modules: list[str]) -> dict[str, str]:
    """Return module -> the extra that the module's error names. Fails for a package that belongs to no extra: the
    distribution does not require the package.
    """
    done = installed.run(installed.python, "-c", IMPORT, json.dumps(modules))
    assert done.returncode == 0, done.stderr[-3000:]
    lacks = json.loads(done.stdout.splitlines()[-1])
    fields = {}
    for module, package in lacks.items():
        message = str(explain_missing(ModuleNotFoundError(module, name=package)))
        fields[module] = message.partition("toolcrew[")[2].partition("]")[0]
    return fields


def test_the_wheel_contains_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = set(source_files())
    assert held == wanted
    assert {"toolcrew/workers/sandboxd/runtime/seccomp.json", "toolcrew/store/runs.lua"} <= held


def test_every_module_imports_with_the_extra_that_its_error_names(
    unpacked: Path, bare: Installed, tmp_path: Path
) -> None:
    modules = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in source_files()
        if name.endswith(".py")
    )
    lacking = find_lacks(bare, modules)
    assert "toolcrew.contract.envelope" not in lacking
    assert lacking["toolcrew.workers.sandboxd.runtime.engine"] == "worker"
    needless = [
        name
        for name in lacking
        if name.removeprefix("toolcrew.").startswith(
            ("archives", "concurrency", "contract", "store", "orchestrator.sdk", "orchestrator.cli")
        )
    ]
    assert needless == []
    # The package verifiers can be installed only without the extra `worker`.
    assert lacking.pop("toolcrew.orchestrator.adapters.verifiers") == "verifiers"
    made: dict[str, Installed] = {}
    # Twice, because the first check may name the wrong extra of a package that two extras contain.
    for _ in range(2):
        asking: dict[str, list[str]] = {}
        for module, extra in lacking.items():
            asking.setdefault(extra, []).append(module)
        lacking = {}
        for extra, names in asking.items():
            if extra not in made:
                made[extra] = make_environment(tmp_path / extra, unpacked, (extra,))
            lacking |= find_lacks(made[extra], names)
    # harbor can be installed only for Python 3.12 and later.
    assert lacking == ({} if sys.version_info >= (3, 12) else {"toolcrew.orchestrator.adapters.harbor": "harbor"})


def test_all_extras_are_installed_together_from_the_wheel(wheel: Path, unpacked: Path, tmp_path: Path) -> None:
    extras = tuple(read_extras().keys() - {"verifiers"})
    installed = make_environment(tmp_path / "venv", unpacked, extras, is_installed=False)
    pip = (sys.executable, "-m", "pip", "--python", installed.python, "--disable-pip-version-check")
    done = installed.run(
        *pip, "install", "--no-index", "--no-compile", f"toolcrew[{','.join(extras)}] @ {wheel.as_uri()}"
    )
    assert done.returncode == 0, done.stderr
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    result = installed.run("toolcrew", "--version")
    assert (result.returncode, result.stdout) == (0, f"toolcrew {version}\n"), result.stderr


@pytest.mark.parametrize("program", ["toolcrew.workers.sandboxd", "toolcrew.workers"], ids=["sandboxd", "web"])
def test_a_program_without_its_extra_names_the_extra(bare: Installed, redis_server: RedisProcess, program: str) -> None:
    done = bare.run(bare.python, "-m", program, TOOLCREW_WORKER_KIND="web", TOOLCREW_REDIS_URL=redis_server.url)
    last_line = read_start_error(done.stderr).strip()
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert last_line.startswith("the package '")
    assert last_line.endswith("is not installed: pip install 'toolcrew[worker]'")


def test_without_extras_help_works_and_a_stack_names_its_extras(bare: Installed) -> None:
    toolcrew = (bare.python, "-m", "toolcrew.orchestrator")
    shown = bare.run(*toolcrew, "--help")
    assert (shown.returncode, "Start here:" in shown.stdout) == (0, True), shown.stderr
    for command in (("up",), ("call", "bash_tool", "command=true")):
        done = bare.run(*toolcrew, *command)
        assert (done.returncode, "pip install 'toolcrew[worker,ops]'" in done.stderr) == (1, True), done.stderr


def test_a_missing_module_of_the_project_is_raised_unchanged() -> None:
    bug = ModuleNotFoundError("x", name="toolcrew.orchestrator.no_such_module")
    with pytest.raises(ModuleNotFoundError) as raised:
        explain_missing(bug)
    assert raised.value is bug


def test_the_named_extras_are_those_of_pyproject() -> None:
    assert set(EXTRAS) == set(read_extras())


CLASHING = ("archives", "concurrency", "contract", "orchestrator", "store", "telemetry", "workers")
CALL = """
import asyncio
import archives, concurrency, config, contract, orchestrator, store, telemetry, workers
import toolcrew
from toolcrew import ToolClient

assert "site-packages" not in store.__file__ + workers.__file__ + config.__file__
print(sorted(set(dir(toolcrew)) & {*toolcrew.__all__}) == sorted(toolcrew.__all__))


async def main():
    async with ToolClient.embedded(workers_only=True) as client, await client.open_session() as session:
        result = await session.call("bash_tool", {"command": "echo $((6 * 7))"})
        print(result.success, result.output.strip())


asyncio.run(main())
"""


@pytest.mark.stack
def test_a_project_with_folders_of_our_names_runs_a_call(wheel: Path, unpacked: Path, tmp_path: Path) -> None:
    installed = make_environment(tmp_path / "venv", unpacked, ("worker", "ops"))
    require_engine()
    for name in CLASHING:
        folder = installed.folder / name
        folder.mkdir()
        (folder / "__init__.py").write_text(f"raise_if_run = {name!r}\n")
        (folder / "__main__.py").write_text("raise SystemExit('the wrong program ran')\n")
    (installed.folder / "config.py").write_text("")
    (installed.folder / "program.py").write_text(CALL)
    done = installed.run(installed.python, "program.py")
    assert (done.returncode, done.stdout.split()) == (0, ["True", "True", "42"]), done.stderr[-3000:]
