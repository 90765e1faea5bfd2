"""A short run of scripts/fuzz, the same inputs every time."""

from tests.fuzz.runner import run

INPUTS = 4500


def test_random_inputs_raise_no_unexpected_exception() -> None:
    run(seed=1, count=INPUTS)
