"""The items that stand as failed, grouped by kind and code, and some of them as examples."""

from dataclasses import dataclass, field

from orchestrator.batches.snapshot import FailureGroup
from store.batches import FailureKind

MAX_GROUPS = 200
MAX_EXAMPLES = 3
MAX_MESSAGE_CHARS = 2000
OTHER_CODES = "(other codes)"


@dataclass(frozen=True, order=True)
class FailedItem:
    """`code`: as it was told, also where the group is one of other codes."""

    at: float
    item: str
    run: str
    attempt: int
    kind: FailureKind
    code: str
    message: str


@dataclass
class _Group:
    kind: FailureKind
    code: str
    count: int = 0
    kept: dict[str, FailedItem] = field(default_factory=dict)


class FailureGroups:
    """A group has a number from 1. `max_rows`: so many failed items are kept in all, those heard of first, and
    MAX_EXAMPLES of each group in any case.
    """

    def __init__(self, max_rows: int = 0) -> None:
        self._max_rows = max_rows
        self._rows = 0
        self._groups: list[_Group] = []
        self._numbers: dict[tuple[FailureKind, str], int] = {}

    def number(self, kind: FailureKind, code: str) -> int:
        """Of its group. Codes beyond MAX_GROUPS share one a kind."""
        key = kind, code if (kind, code) in self._numbers or len(self._groups) < MAX_GROUPS else OTHER_CODES
        if key not in self._numbers:
            self._groups.append(_Group(*key))
            self._numbers[key] = len(self._groups)
        return self._numbers[key]

    def enter(self, number: int, failed: FailedItem) -> None:
        """An item stands as failed now."""
        group = self._groups[number - 1]
        group.count += 1
        if len(group.kept) < MAX_EXAMPLES or self._rows < self._max_rows:
            group.kept[failed.item] = failed
            self._rows += 1

    def leave(self, number: int, item: str) -> None:
        """It is tried again."""
        group = self._groups[number - 1]
        group.count -= 1
        self._rows -= group.kept.pop(item, None) is not None

    def rows(self) -> list[FailedItem]:
        """Those that are kept, by time."""
        return sorted(failed for group in self._groups for failed in group.kept.values())

    def by_kind(self) -> dict[FailureKind, int]:
        counts = dict.fromkeys(FailureKind, 0)
        for group in self._groups:
            counts[group.kind] += group.count
        return {kind: count for kind, count in counts.items() if count}

    def groups(self) -> tuple[FailureGroup, ...]:
        """The largest first."""
        standing = sorted(
            (group for group in self._groups if group.count), key=lambda group: (-group.count, group.kind, group.code)
        )
        return tuple(_shown(group) for group in standing)


def _shown(group: _Group) -> FailureGroup:
    shown = FailureGroup(kind=group.kind, code=group.code, count=group.count)
    if not group.kept:
        return shown
    example = min(group.kept.values())
    return shown.model_copy(update={"item": example.item, "run": example.run, "message": example.message})
