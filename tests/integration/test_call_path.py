"""scripts/call_path: the files that one call of bash_tool passes through, and a limit on them."""

import json
import subprocess
import sys

import pytest

from scripts.call_path import find_code
from tests.support.guest.guest_harness import needs_namespace
from tests.support.stack.stack import ROOT, Footprint

pytestmark = [pytest.mark.stack, needs_namespace]

# A ratchet: measured 63 files of 14,300 lines of code, of which 4,890 are in functions that run. Scripts in memory
# files, the account of stored bytes and the check of bytes that are not UTF-8 take 3 files. Lower the limits when the
# path gets shorter.
MAX_FILES = 65
MAX_LINES = 14_760
MAX_RUN = 4_920


def test_one_bash_call_executes_the_known_files_and_stays_below_the_limits(footprint: Footprint) -> None:
    script = [sys.executable, "-m", "scripts.call_path", "--json"]
    ran = subprocess.run(script, cwd=ROOT, env=footprint.environment(), stdout=subprocess.PIPE, timeout=110, check=True)

    report = json.loads(ran.stdout)
    files = {role: process["by_file"] for role, process in report["processes"].items()}
    assert "orchestrator/dispatch/dispatcher.py" in files["orchestrator"]
    assert {"workers/executor.py", "workers/tools/shell.py"} <= set(files["worker"])
    assert "workers/sandboxd/sandbox.py" in files["sandboxd"]
    assert "sandbox-images/guest/supervisors.py" in files["guest"]
    every = {file: lines for counted in files.values() for file, lines in counted.items()}
    assert (report["total"]["files"], report["total"]["lines"]) == (len(every), sum(every.values()))
    assert 3_000 < report["total"]["run"] <= MAX_RUN
    assert report["total"]["files"] <= MAX_FILES
    assert report["total"]["lines"] <= MAX_LINES
    assert every["workers/executor.py"] == len(find_code((ROOT / "workers/executor.py").read_text()))
    assert "workers/duties.py" not in every, "background work was recorded"
    assert "workers/sandboxd/monitor.py" not in every, "background work was recorded"
