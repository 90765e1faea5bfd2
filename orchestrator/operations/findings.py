"""Results of `toolcrew doctor`, for people and programs."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CheckResult:
    """Result of one check. `needed` False: the deployment works without it. `remedy`: the action to take, if `text`
    does not contain it.
    """

    name: str
    is_good: bool
    text: str
    needed: bool = True
    remedy: str = ""


@dataclass
class Report:
    """All results in the order of the checks. Also the table of security guarantees of this host's sandboxes, which
    sandboxd's own check returns.

    A row of the table has `name`, `state` (holds, broken, unknown), `why`, `remedy` and `is_needed`.
    """

    findings: list[CheckResult] = field(default_factory=list)
    guarantees: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_healthy(self) -> bool:
        is_broken = any(row["is_needed"] and row["state"] == "broken" for row in self.guarantees)
        return not is_broken and all(finding.is_good for finding in self.findings if finding.needed)

    def add(self, name: str, is_good: bool, text: str, *, needed: bool = True) -> None:
        self.findings.append(CheckResult(name, is_good, text, needed))

    def add_passed(self, name: str, text: str) -> None:
        """Add a check that found no problem."""
        self.findings.append(CheckResult(name, True, text))

    def add_warning(self, name: str, text: str, remedy: str) -> None:
        """Add a problem that needs attention, but does not stop a service."""
        self.findings.append(CheckResult(name, False, text, needed=False, remedy=remedy))

    def add_failure(self, name: str, text: str, remedy: str) -> None:
        """Add a problem that stops a service or loses data until the problem is fixed."""
        self.findings.append(CheckResult(name, False, text, remedy=remedy))

    def lines(self) -> list[str]:
        """Return one line per finding, and the remedy below each problem."""
        marks = {(True, True): "ok  ", (True, False): "ok  ", (False, True): "FAIL", (False, False): "note"}
        width = max((len(finding.name) for finding in self.findings), default=0)
        lines = []
        for finding in self.findings:
            lines.append(f"{marks[(finding.is_good, finding.needed)]}  {finding.name:<{width}}  {finding.text}")
            if finding.remedy and not finding.is_good:
                lines.append(f"{'':<4}  {'':<{width}}  -> {finding.remedy}")
        return lines

    def guarantee_lines(self) -> list[str]:
        """Return the table of guarantees, and the remedy below each one that does not hold."""
        width = max((len(str(row["name"])) for row in self.guarantees), default=0)
        lines = ["", "guarantees of this host's sandboxes"] if self.guarantees else []
        for row in self.guarantees:
            lines.append(f"{row['state']:<7}  {row['name']:<{width}}  {row['why']}")
            if row["state"] != "holds" and row["remedy"]:
                lines.append(f"{'':<7}  {'':<{width}}  -> {row['remedy']}")
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            "healthy": self.is_healthy,
            "findings": [vars(finding) for finding in self.findings],
            "guarantees": self.guarantees,
        }
