"""All benchmarks run at their smallest size and report their figures, so that none breaks unnoticed. No time is checked:
the machine may be busy.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import NAMES
from tests.model_server.running import running_model_server
from tests.support.stack.stack import missing, require_engine

ROOT = Path(__file__).resolve().parents[2]
# An idle machine needs two minutes for all of them.
LIMIT_S = 900.0
# The local model would take most of the time of these tests.
PLAYED = ({"kind": "rule", "when": {}, "reply": {"text": "It is done."}},)

pytestmark = [pytest.mark.stack, pytest.mark.timeout(LIMIT_S + 30)]


@dataclass(frozen=True)
class Run:
    """One run of all benchmarks. `reports`: of those that did not fail. `errors`: its stderr output."""

    reports: Mapping[str, Any]
    errors: str


@pytest.fixture(scope="module")
def run() -> Run:
    """Run all benchmarks, as `scripts/bench` does without a name."""
    require_engine()
    if shutil.which("docker-registry") is None:
        missing("no docker-registry: apt-get install docker-registry")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TOOLCREW_")}
    # Benchmarks of the warm pool turn it on themselves.
    environment["TOOLCREW_POOL_SIZE"] = "0"
    with running_model_server(PLAYED) as model:
        ran = subprocess.run(
            [sys.executable, "-m", "benchmarks", "--smallest", "--json", "--model", "played"],
            cwd=ROOT,
            env=environment | model.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert ran.stdout, ran.stderr
    reports = json.loads(ran.stdout)
    assert (ran.returncode == 0) == (set(NAMES) <= set(reports)), ran.stderr
    return Run(reports, ran.stderr)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_at_its_smallest_size(run: Run, name: str) -> None:
    assert name in run.reports, run.errors
    figures = {key: value for key, value in run.reports[name].items() if key not in ("targets", "notes")}
    assert figures
    assert all(math.isfinite(value) for value in figures.values()), figures
