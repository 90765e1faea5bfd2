"""The table of guarantees in the output of `toolcrew doctor`."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.operations import doctor
from orchestrator.operations.doctor import examine
from orchestrator.operations.findings import Report
from orchestrator.settings import OrchestratorSettings


def build_row(name: str, state: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "state": state, "why": f"why {name}", "remedy": f"fix {name}", "is_needed": False, **fields}


def test_what_to_do_stands_below_what_is_not_good() -> None:
    report = Report()
    report.add_passed("memory", "1 MiB")
    report.add_failure("redis", "gone", "start it")
    assert report.lines() == ["ok    memory  1 MiB", "FAIL  redis   gone", "              -> start it"]
    report = Report(guarantees=[build_row("short", "holds"), build_row("much longer", "broken")])
    assert report.guarantee_lines()[2:] == [
        "holds    short        why short",
        "broken   much longer  why much longer",
        "                      -> fix much longer",
    ]


def test_a_broken_guarantee_makes_no_host_unhealthy_and_a_missing_need_does() -> None:
    report = Report(guarantees=[build_row("hostile tenants are isolated", "broken")])
    report.add("engine", True, "Docker")
    assert report.is_healthy

    report.guarantees.append(build_row("runtimes are installed", "broken", is_needed=True))
    assert not report.is_healthy


@pytest.mark.parametrize(
    ("at_term", "left"), [("rm sandbox; exit 1", []), ("", ["sandbox"])], ids=["in order", "by force"]
)
async def test_a_check_that_takes_too_long_is_ended_so_that_it_can_clear_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at_term: str, left: list[str]
) -> None:
    check = tmp_path / "check"
    check.write_text(f"#!/bin/sh\ncd {tmp_path}\ntrap '{at_term}' TERM\ntouch sandbox\nwhile :; do sleep 0.02; done\n")
    check.chmod(0o755)
    monkeypatch.setattr(doctor, "program", lambda *_: (str(check),))
    monkeypatch.setattr(doctor, "CHECK_TIMEOUT_S", 0.3)
    monkeypatch.setattr(doctor, "CHECK_END_S", 0.3)

    report = await examine(OrchestratorSettings())

    assert [(found.is_good, found.text) for found in report.findings if found.name == "engine"] == [
        (False, "the check of engine and sandbox did not end within 0.3 s: restart the Docker engine")
    ]
    assert list_folder(tmp_path) == ["check", *left]


def list_folder(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
