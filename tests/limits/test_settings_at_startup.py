"""Every program refuses an unknown setting when it starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stack.stack import ROOT

PROGRAMS = (
    "orchestrator hosts list",
    "toolcrew.orchestrator.operations.flower",
    "workers",
    "toolcrew.workers.sandboxd",
    "toolcrew.workers.egress",
    "toolcrew.contract.settings",
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_refuses_an_unknown_setting_at_startup(program: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", *program.split()]
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "TOOLCREW_REDIS_UR": "redis://x",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(argv, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert list(tmp_path.iterdir()) == []
    assert "did you mean TOOLCREW_REDIS_URL?" in done.stderr + done.stdout
