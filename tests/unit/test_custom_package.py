"""Packages with tools, as their authors write them: the example of docs/add-a-tool.md, and the worker's messages
about a faulty package.
"""

import runpy
from pathlib import Path

import pytest

from tests.conftest import RedisProcess
from tests.log_lines import read_last_words
from workers import __main__ as worker

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "order_tools"


def test_a_broken_package_stops_the_start_with_its_name(
    redis_server: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_tools.py").write_text("import surely_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    monkeypatch.setenv("TOOLCREW_WORKER_KIND", "web")
    monkeypatch.setenv("TOOLCREW_TOOL_MODULES", '["broken_tools"]')
    monkeypatch.setattr(worker, "configure_logging", lambda *_: None)
    assert worker.main() == 1
    text = read_last_words(capfd.readouterr().err)
    assert text.startswith("the module 'broken_tools' of TOOLCREW_TOOL_MODULES cannot be loaded: ModuleNotFoundError")


def test_the_example_passes_its_own_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    files = sorted((EXAMPLE / "tests").glob("test_*.py"))
    tests = [value for file in files for name, value in runpy.run_path(str(file)).items() if name.startswith("test_")]
    assert len(tests) == 7
    for test in tests:
        test()
