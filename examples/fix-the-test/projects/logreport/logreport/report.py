"""Summary of a log."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from logreport.parsing import LEVELS, Entry, parse_line


@dataclass
class Report:
    entries: list[Entry] = field(default_factory=list)
    unreadable: int = 0

    def levels(self) -> dict[str, int]:
        counted = Counter(entry.level for entry in self.entries)
        return {level: counted[level] for level in LEVELS}

    def worst_source(self) -> str | None:
        """Return the service with the most errors; of several, the first by name."""
        counted = Counter(entry.source for entry in self.entries if entry.level == "ERROR")
        return min(counted, key=lambda source: (-counted[source], source), default=None)


def read_report(lines: Iterable[str]) -> Report:
    report = Report()
    for line in lines:
        if not line.strip():
            continue
        try:
            report.entries.append(parse_line(line))
        except ValueError:
            report.unreadable += 1
    return report
