"""The traces of one item of a batch: each attempt that was begun anew has its own, RUN, RUN-2, RUN-3 ..."""

import re
from dataclasses import dataclass
from pathlib import Path

from orchestrator.traces.reading import find_trace

_ITEM_RUN = re.compile(r"[0-9a-f]{24}")
"""The run of an item; other runs may be called anything."""


@dataclass(frozen=True)
class Attempts:
    """`path`: the trace that is meant by a name; `earlier`: those of attempts before it, in their order."""

    path: Path
    earlier: tuple[Path, ...] = ()

    def note(self) -> str | None:
        """That there are others, as a sentence."""
        if not self.earlier:
            return None
        told = ", ".join(str(path) for path in self.earlier)
        return f"this is the last of {len(self.earlier) + 1} attempts; give the path of another to see that: {told}"


def find_attempts(folder: Path, name: str, tenant: str | None = None) -> Attempts:
    """The last attempt of the run of an item, by its id; any other trace by its id or path. Raises ConfigError as
    `find_trace` does.
    """
    if not _ITEM_RUN.fullmatch(name):
        return Attempts(find_trace(folder, name, tenant))
    numbered = {
        number: path for path in folder.glob(f"{tenant or '*'}/{name}-*.jsonl") if (number := _number(path, name))
    }
    if not numbered:
        return Attempts(find_trace(folder, name, tenant))
    last = find_trace(folder, f"{name}-{max(numbered)}", tenant)
    beside = [
        last.with_name(f"{name}.jsonl"),
        *(last.with_name(f"{name}-{number}.jsonl") for number in sorted(numbered)),
    ]
    return Attempts(last, tuple(path for path in beside if path != last and path.is_file()))


def _number(path: Path, name: str) -> int:
    """Which attempt a file is of; 0 for none."""
    told = path.stem.removeprefix(f"{name}-")
    return int(told) if told.isascii() and told.isdigit() and not told.startswith("0") and len(told) < 9 else 0
