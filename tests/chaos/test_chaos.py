"""A round of every kind on one harness, with short pauses. scripts/chaos plays twenty rounds of each kind."""

import os
import secrets
import sys
from collections.abc import Iterator

import pytest
from docker import APIClient

from tests.chaos.blows import BLOWS, Blow
from tests.chaos.rounds import Terms, open_chaos, play
from tests.support.stack.host_harness import Harness

pytestmark = pytest.mark.stack

SEED = os.environ.get("TOOLCREW_CHAOS_SEED") or secrets.token_hex(4)
TERMS = Terms(sessions=4, moments_s=(0.3, 1.0), pause_s=(1.0, 2.0))
LONG_ENOUGH_S = (12.0, 12.5)
"""A worker's report expires within this pause."""


@pytest.fixture(scope="module")
def harness(engine: APIClient) -> Iterator[Harness]:
    with open_chaos(engine, TERMS) as opened:
        yield opened


def hold(harness: Harness, blows: list[Blow]) -> None:
    """Play the faults. Fails with all failures, and with the seed that repeats the round."""
    _print_progress(f"TOOLCREW_CHAOS_SEED={SEED}")

    report = play(harness, blows, TERMS, SEED, _print_progress)

    if report.wrong:
        _print_progress(harness.log_tails())
        pytest.fail("\n".join(report.wrong), pytrace=False)
    assert report.verdict is not None
    assert report.verdict.succeeded > 0


def _print_progress(sentence: str) -> None:
    sys.stdout.write(f"{sentence}\n")


def test_every_call_has_one_result_and_acts_at_most_once_when_any_process_is_killed(harness: Harness) -> None:
    hold(harness, [blow for blow in BLOWS if blow.deed == "kill"])


def test_every_call_has_one_result_and_acts_at_most_once_when_any_process_hangs(harness: Harness) -> None:
    """Pause one worker until the worker is considered lost. After the pause the worker must not run the calls that it
    held.
    """
    short = [blow for blow in BLOWS if blow.deed == "pause" and blow.target != "worker"]

    hold(harness, [*short, Blow("pause", "worker", LONG_ENOUGH_S)])
