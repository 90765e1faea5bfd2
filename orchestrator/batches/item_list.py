"""The items of a file, kept so that they take no more memory than a few times its text."""

from collections.abc import Iterator, Sequence
from typing import overload

from store.batches import BatchItem

MANY_VALUES = 64
"""Lists, objects and what they hold: as records these take ten times their text and more, so items with more of them
are kept as text.
"""


class ItemList(Sequence[BatchItem]):
    """Filled once, in the order of the lines. Those that are kept as text are made anew whenever they are asked for."""

    def __init__(self) -> None:
        self._kept: list[BatchItem | bytes] = []

    def add(self, item: BatchItem, values: int) -> None:
        """`values`: how many there are in its line, or a few more."""
        self._kept.append(item if values <= MANY_VALUES else item.model_dump_json().encode())

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, place: int) -> BatchItem: ...

    @overload
    def __getitem__(self, place: slice) -> list[BatchItem]: ...

    def __getitem__(self, place: int | slice) -> BatchItem | list[BatchItem]:
        return [_made(kept) for kept in self._kept[place]] if isinstance(place, slice) else _made(self._kept[place])

    def __iter__(self) -> Iterator[BatchItem]:
        return map(_made, self._kept)


def _made(kept: BatchItem | bytes) -> BatchItem:
    return BatchItem.model_validate_json(kept) if isinstance(kept, bytes) else kept
