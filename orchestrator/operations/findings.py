"""What `toolcrew doctor` has found, as people and programs are told it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `needed` False: something still works without it; `remedy`: what to do, where `text` does
    not say it.
    """

    name: str
    is_good: bool
    text: str
    needed: bool = True
    remedy: str = ""


@dataclass
class Report:
    """All findings, in the order of looking; and the table of what sandboxes of this host promise, as sandboxd's check
    gives it.

    A row of it has `name`, `state` (holds, void, unknown), `why`, `remedy` and `is_needed`.
    """

    findings: list[Finding] = field(default_factory=list)
    promises: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_healthy(self) -> bool:
        void = any(row["is_needed"] and row["state"] == "void" for row in self.promises)
        return not void and all(finding.is_good for finding in self.findings if finding.needed)

    def add(self, name: str, is_good: bool, text: str, *, needed: bool = True) -> None:
        self.findings.append(Finding(name, is_good, text, needed))

    def good(self, name: str, text: str) -> None:
        """It is as it should be."""
        self.findings.append(Finding(name, True, text))

    def note(self, name: str, text: str, remedy: str) -> None:
        """Something works without it, or somebody should look at it."""
        self.findings.append(Finding(name, False, text, needed=False, remedy=remedy))

    def broken(self, name: str, text: str, remedy: str) -> None:
        """Something is not served, or is lost, until that is done."""
        self.findings.append(Finding(name, False, text, remedy=remedy))

    def lines(self) -> list[str]:
        """A line a finding, and below those that are not good what to do."""
        marks = {(True, True): "ok  ", (True, False): "ok  ", (False, True): "FAIL", (False, False): "note"}
        width = max((len(found.name) for found in self.findings), default=0)
        lines = []
        for found in self.findings:
            lines.append(f"{marks[(found.is_good, found.needed)]}  {found.name:<{width}}  {found.text}")
            if found.remedy and not found.is_good:
                lines.append(f"{'':<4}  {'':<{width}}  -> {found.remedy}")
        return lines

    def promise_lines(self) -> list[str]:
        """The table of promises; below each that does not hold, what to do."""
        width = max((len(str(row["name"])) for row in self.promises), default=0)
        lines = ["", "what sandboxes of this host promise"] if self.promises else []
        for row in self.promises:
            lines.append(f"{row['state']:<7}  {row['name']:<{width}}  {row['why']}")
            if row["state"] != "holds" and row["remedy"]:
                lines.append(f"{'':<7}  {'':<{width}}  -> {row['remedy']}")
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            "healthy": self.is_healthy,
            "findings": [vars(finding) for finding in self.findings],
            "promises": self.promises,
        }
