"""A short run of scripts/fuzz, the same inputs every time."""

from random import Random

import pytest

from tests.fuzz.runner import CHECKS, Failed, run, run_one

INPUTS = 4500


def test_random_inputs_break_nothing() -> None:
    run(seed=1, count=INPUTS)


def test_a_failure_reports_how_to_run_its_input_again() -> None:
    def fails(random: Random) -> None:
        raise AssertionError(f"made of {random.random()}")

    with pytest.raises(
        Failed, match=r"always, seed 5, input 7 .*--seed 5 --first 7 1.*: AssertionError: made of 0"
    ) as first:
        run_one(5, 7, {"always": fails})
    with pytest.raises(Failed) as second:
        run_one(5, 7, {"always": fails})
    assert str(first.value) == str(second.value)


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_has_inputs_of_its_own(name: str) -> None:
    for number in range(20):
        run_one(2, number, {name: CHECKS[name]})
