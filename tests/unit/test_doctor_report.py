"""How `toolcrew doctor` shows the table of promises."""

from typing import Any

from orchestrator.doctor import Report


def build_row(name: str, state: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "state": state, "why": f"why {name}", "remedy": f"mend {name}", "is_needed": False, **fields}


def test_each_promise_is_a_line_and_what_to_do_stands_below_those_that_do_not_hold() -> None:
    report = Report(promises=[build_row("short", "holds"), build_row("much longer", "void"), build_row("other", "unknown")])

    assert report.promise_lines() == [
        "",
        "what sandboxes of this host promise",
        "holds    short        why short",
        "void     much longer  why much longer",
        "                      -> mend much longer",
        "unknown  other        why other",
        "                      -> mend other",
    ]


def test_a_void_promise_makes_no_host_unhealthy_and_a_missing_need_does() -> None:
    report = Report(promises=[build_row("hostile tenants are apart", "void")])
    report.add("engine", True, "Docker")
    assert report.is_healthy

    report.promises.append(build_row("runtimes are there", "void", is_needed=True))
    assert not report.is_healthy


def test_without_a_table_nothing_is_shown() -> None:
    assert Report().promise_lines() == []
    assert Report().to_json() == {"healthy": True, "findings": [], "promises": []}
