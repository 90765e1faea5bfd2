"""The selection of tests for a change (scripts/changed_tests.py)."""

from pathlib import Path

import pytest

from scripts.changed_tests import find_tests

TREE = {
    "contract/clock.py": "",
    "store/runs.py": "from toolcrew.contract.clock import now\nFILE = 'runs.lua'",
    "store/tenants.py": "",
    "tests/conftest.py": "from toolcrew.store import runs, tenants",
    "tests/support/builders.py": "from toolcrew.store import runs",
    "tests/store/test_runs.py": "from tests.conftest import start\nfrom tests.support.builders import build",
    "tests/store/test_tenants.py": "from tests.conftest import start\nfrom toolcrew.store import tenants",
    "tests/e2e/conftest.py": "",
    "tests/e2e/test_pages.py": "PAGE = 'names.md'",
}


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        pytest.param("contract/clock.py", ["tests/store/test_runs.py"], id="imported through others"),
        pytest.param("store/tenants.py", ["tests/store/test_tenants.py"], id="imported"),
        pytest.param("store/runs.lua", ["tests/store/test_runs.py"], id="read by an imported module"),
        pytest.param("docs/names.md", ["tests/e2e/test_pages.py"], id="a page"),
        pytest.param("tests/store/test_tenants.py", ["tests/store/test_tenants.py"], id="the test itself"),
        pytest.param("tests/e2e/conftest.py", ["tests/e2e/test_pages.py"], id="the fixtures of a folder"),
        pytest.param("store/removed.py", [], id="a removed file"),
    ],
)
def test_a_change_concerns_the_tests_that_use_it(tmp_path: Path, changed: str, tests: list[str]) -> None:
    for path, source in TREE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f'"""One duty."""\n{source}\n')
    assert find_tests(tmp_path, [changed]) == tests
