"""The table of guarantees in the output of `toolcrew doctor`."""

import os
from pathlib import Path
from typing import Any

import pytest

from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.operations import doctor
from toolcrew.orchestrator.operations.doctor import examine
from toolcrew.orchestrator.operations.findings import Report


def build_row(name: str, state: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "state": state, "why": f"why {name}", "remedy": f"fix {name}", "is_needed": False, **fields}


def test_a_remedy_is_printed_below_each_problem() -> None:
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


def test_only_a_broken_needed_guarantee_makes_the_host_unhealthy() -> None:
    report = Report(guarantees=[build_row("hostile tenants are isolated", "broken")])
    report.add("engine", True, "Docker")
    assert report.is_healthy

    report.guarantees.append(build_row("runtimes are installed", "broken", is_needed=True))
    assert not report.is_healthy


@pytest.mark.parametrize(
    ("at_term", "remaining"), [("rm sandbox; exit 1", []), ("", ["sandbox"])], ids=["sigterm", "sigkill"]
)
async def test_a_slow_check_is_terminated_after_time_to_clean_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at_term: str, remaining: list[str]
) -> None:
    check = tmp_path / "check"
    check.write_text(f"#!/bin/sh\ncd {tmp_path}\ntrap '{at_term}' TERM\ntouch sandbox\nwhile :; do sleep 0.02; done\n")
    check.chmod(0o755)
    monkeypatch.setattr(doctor, "program", lambda *_: (str(check),))
    monkeypatch.setattr(doctor, "CHECK_TIMEOUT_S", 0.3)
    monkeypatch.setattr(doctor, "CHECK_END_S", 0.3)

    report = await examine(OrchestratorSettings())

    assert [(finding.is_good, finding.text) for finding in report.findings if finding.name == "engine"] == [
        (False, "the check of engine and sandbox did not end within 0.3 s: restart the engine")
    ]
    assert sorted(os.listdir(tmp_path)) == ["check", *remaining]
