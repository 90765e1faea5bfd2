"""docs/log-events.md: every event that the sources log, with its meaning."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))


def test_every_event_is_documented_and_the_page_is_what_the_sources_say() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "log_events.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
