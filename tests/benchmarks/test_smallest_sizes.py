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
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import NAMES
from tests.model_server.running import running_model_server
from tests.stack import missing, require_engine

ROOT = Path(__file__).resolve().parents[2]
# An idle machine needs two minutes for all of them.
LIMIT_S = 900.0
# The local model would take most of the time of these tests.
PLAYED = ({"kind": "rule", "when": {}, "reply": {"text": "It is done."}},)

pytestmark = [pytest.mark.stack, pytest.mark.timeout(LIMIT_S + 30)]


@pytest.fixture(scope="module")
def reports() -> Mapping[str, Any]:
    """Return the reports of one run of all benchmarks, as `scripts/bench` runs them without a name."""
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
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_at_its_smallest_size(reports: Mapping[str, Any], name: str) -> None:
    figures = {key: value for key, value in reports[name].items() if key not in ("targets", "notes")}
    assert figures
    assert all(math.isfinite(value) for value in figures.values()), figures
