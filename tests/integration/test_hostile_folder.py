"""Programs of toolcrew that start in an attacker's folder run no code from that folder."""

import subprocess
from pathlib import Path

import pytest
from docker import APIClient

from tests.support.stack.stack import TOOLCREW, open_footprint

NAMES = (
    "json",
    "redis",
    "celery",
    "structlog",
    "workers",
    "orchestrator",
    "contract",
    "telemetry",
    "store",
    "concurrency",
    "archives",
    "toolcrew",
    "sitecustomize",
)


@pytest.mark.stack
@pytest.mark.parametrize(
    "command",
    [("doctor", "--json"), ("call", "bash_tool", "command=echo hi", "--json"), ("config", "show")],
    ids=lambda words: words[0],
)
def test_a_command_runs_no_code_of_the_folder_in_which_it_is_called(
    engine: APIClient, tmp_path: Path, command: tuple[str, ...]
) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + ' ')")
    with open_footprint(engine) as footprint:
        # An embedded stack starts all kinds of processes.
        done = subprocess.run(
            [TOOLCREW, *command],
            cwd=tmp_path,
            env=footprint.environment({}),
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
    assert "Traceback" not in done.stderr
    assert done.stdout
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
