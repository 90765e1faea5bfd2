"""Effect of TOOLCREW_TEST_REQUIRE: with the variable, a missing part of the machine fails the tests that need it.
Otherwise those tests are skipped.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack import ROOT

NEEDS_GUEST = "tests/scenarios/test_s2_commands.py::test_s4_21_the_registry_provides_a_tool_for_shell_commands"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("is_required", [True, False])
def test_tests_with_a_real_guest_fail_where_none_can_be_started(is_required: bool, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TOOLCREW_TEST_REQUIRE"}
    environment |= {"PATH": str(tmp_path)} | ({"TOOLCREW_TEST_REQUIRE": "1"} if is_required else {})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", NEEDS_GUEST],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode != 0 if is_required else done.returncode == 0, done.stdout
    assert ("1 skipped" in done.stdout, "1 error" in done.stdout) == (not is_required, is_required), done.stdout
