"""Half-open spans of minutes since midnight."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Slot:
    start: int
    end: int

    def __post_init__(self) -> None:
        if self.end <= self.start:
            raise ValueError(f"a slot ends after it begins, not {self.start} to {self.end}")

    @property
    def minutes(self) -> int:
        return self.end - self.start
