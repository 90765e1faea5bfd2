"""docs/log-events.md: every event that the sources log, with its meaning."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from log_events import UNWRITTEN, build_page, read_events, read_meanings  # noqa: E402


def read_tree(tmp_path: Path, text: str) -> tuple[dict[str, object], list[str]]:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "x.py").write_text(text)
    events, complaints = read_events(tmp_path)
    return dict(events), complaints


def test_every_event_is_documented_and_the_page_is_what_the_sources_say() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "log_events.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "call",
    [
        'log.info(f"call {x}")',
        'log.warning("Call lost")',
        "self._log.error(event)",
        "log.exception()",
        'logger.info("a b")',
    ],
)
def test_what_is_no_event_is_complained_of(tmp_path: Path, call: str) -> None:
    events, complaints = read_tree(tmp_path, call)
    assert set(events) == {"library_said"}
    assert [one.split(": ")[0] for one in complaints] == ["workers/x.py:1"]


def test_an_event_is_read_with_its_levels_and_fields(tmp_path: Path) -> None:
    _, complaints = read_tree(tmp_path, 'log.info("call_ended", code=1)\nlog.exception("call_ended", why=2)\n')
    assert complaints == []
    event = read_events(tmp_path)[0]["call_ended"]
    assert (event.levels, event.processes, event.fields) == ({"info", "error"}, {"worker"}, {"code", "why"})


def test_a_new_event_has_a_row_to_be_written_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    read_tree(tmp_path, 'log.info("old")\nlog.info("new")\n')
    page = build_page(read_events(tmp_path)[0], {"old": "what it means", "gone": "x"})
    assert read_meanings(page) == {"library_said": UNWRITTEN, "new": UNWRITTEN, "old": "what it means"}
