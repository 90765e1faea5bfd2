"""A program that only calls tools does not load the code of runs, batches and models."""

import subprocess
import sys

MAX_MODULES = 111
"""Lower the number when the graph of imports gets thinner. A higher number needs a reason in the commit."""


def test_the_client_loads_few_modules() -> None:
    program = (
        "import sys, toolcrew; toolcrew.ToolClient; print(*(name for name in sys.modules if name[:8] == 'toolcrew'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.split()
    assert len(loaded) <= MAX_MODULES, sorted(loaded)
    assert not [
        name for name in loaded if name.startswith(("toolcrew.orchestrator.runs", "toolcrew.orchestrator.loop"))
    ]


def test_the_client_of_the_http_api_needs_nothing_of_the_pool() -> None:
    program = "import sys, toolcrew; toolcrew.Client, toolcrew.AsyncClient; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.split()
    assert not {"celery", "redis", "fastapi", "cryptography", "openai", "docker"} & set(loaded)
    assert len([name for name in loaded if name.startswith("toolcrew")]) <= 40
