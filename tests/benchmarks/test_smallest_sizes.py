"""Every benchmark runs at its smallest size and reports its figures, so that none breaks unnoticed. No time is checked:
the machine may be busy.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES
from tests.model_server.running import running_model_server
from tests.stack import missing, require_engine

ROOT = Path(__file__).resolve().parents[2]
# Alone the slowest benchmark takes 40 s.
LIMIT_S = 300.0
# The local model would take most of the time of these tests.
PLAYED = ({"kind": "rule", "when": {}, "reply": {"text": "It is done."}},)


@pytest.mark.stack
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_at_its_smallest_size(name: str) -> None:
    require_engine()
    if name == "image_placement" and shutil.which("docker-registry") is None:
        missing("no docker-registry: apt-get install docker-registry")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TOOLCREW_")}
    # Benchmarks of the warm pool turn it on themselves.
    environment["TOOLCREW_POOL_SIZE"] = "0"

    with running_model_server(PLAYED) if name == "jobs" else nullcontext() as model:
        ran = subprocess.run(
            [sys.executable, "-m", "benchmarks", name, "--smallest", "--json", "--model", "played"],
            cwd=ROOT,
            env=environment | (model.environment() if model is not None else {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)[name]
    figures = {key: value for key, value in report.items() if key not in ("targets", "notes")}
    assert figures
    assert all(math.isfinite(value) for value in figures.values()), figures
