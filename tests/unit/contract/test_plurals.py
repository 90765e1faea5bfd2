"""Nouns behind numbers in texts."""

import pytest

from toolcrew.contract.plurals import count


@pytest.mark.parametrize(
    ("number", "one", "many", "text"),
    [
        (1, "task", "", "1 task"),
        (0, "task", "", "0 tasks"),
        (2, "match", "", "2 matches"),
        (1, "call waits", "calls wait", "1 call waits"),
        (3, "call waits", "calls wait", "3 calls wait"),
    ],
)
def test_only_one_thing_is_in_the_singular(number: int, one: str, many: str, text: str) -> None:
    assert count(number, one, many) == text
