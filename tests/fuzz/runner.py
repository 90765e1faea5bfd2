"""Runs the checks on numbered random inputs. The same seed and number give the same input."""

from collections.abc import Callable, Mapping
from random import Random

from tests.fuzz.decision_checks import check_decision
from tests.fuzz.native_checks import check_native
from tests.fuzz.tag_checks import check_calls, check_hostile
from tests.fuzz.terminal_checks import check_terminal

CHECKS: Mapping[str, Callable[[Random], None]] = {
    "tag_hostile": check_hostile,
    "tag_calls": check_calls,
    "native": check_native,
    "decision": check_decision,
    "terminal": check_terminal,
}
"""A check makes its input from the Random and raises when something does not hold. They take turns."""


class Failed(Exception):
    """An input broke a check. The message names the check and the command that repeats it."""


def run_one(seed: int, number: int) -> None:
    name = list(CHECKS)[number % len(CHECKS)]
    try:
        CHECKS[name](Random(f"{seed}-{number}"))
    except Exception as error:
        raise Failed(
            f"{name}, seed {seed}, input {number} (--seed {seed} --first {number} 1): {type(error).__name__}: {error}"
        ) from error


def run(seed: int, count: int, first: int = 0) -> None:
    """Check the inputs `first` to `first + count`. Raises Failed at the first input that breaks a check."""
    for number in range(first, first + count):
        run_one(seed, number)
