"""A short batch whose orchestrator, worker and Redis are killed. scripts/chaos batch plays long batches."""

import os
import sys

import pytest
from docker import APIClient

from tests.chaos.batch_rounds import BatchTerms, play_batch
from tests.chaos.rounds import Terms, open_chaos

pytestmark = pytest.mark.stack

SEED = os.environ.get("TOOLCREW_CHAOS_SEED") or "short"
"""A fixed seed gives the same faults each time; scripts/chaos batch draws other seeds."""


def test_every_batch_item_has_one_row_and_acts_once_when_any_process_is_killed(engine: APIClient) -> None:
    _print_progress(f"TOOLCREW_CHAOS_SEED={SEED}")

    with open_chaos(engine, Terms(has_tools=False)) as harness:
        report = play_batch(
            harness, BatchTerms(runs=8, calls=3, concurrency=4, blows=3, call_s=0.0), SEED, "short", _print_progress
        )
        if report.wrong:
            _print_progress(harness.log_tails())
            pytest.fail("\n".join(report.wrong), pytrace=False)

    assert report.verdict is not None
    assert {blow.kind for blow in report.struck} == {"orchestrator", "worker", "redis"}


def _print_progress(sentence: str) -> None:
    sys.stdout.write(f"{sentence}\n")
