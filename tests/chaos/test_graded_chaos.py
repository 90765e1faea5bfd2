"""A short batch of graded items whose processes are killed. scripts/chaos graded plays a long one."""

import os

import pytest
from docker import APIClient

from tests.chaos.graded import play_graded
from tests.chaos.rounds import Terms, open_chaos

pytestmark = pytest.mark.stack

SEED = os.environ.get("TOOLCREW_CHAOS_SEED") or "short"


def test_no_failure_becomes_a_reward_when_any_process_is_killed(engine: APIClient) -> None:
    with open_chaos(engine, Terms(has_tools=False)) as harness:
        report = play_graded(harness, 16, 3, SEED, "graded")
        if report.wrong:
            pytest.fail("\n".join([*report.wrong, *report.blows, harness.log_tails()]), pytrace=False)
    assert report.ends["reward 1"] > 0
    assert report.ends["reward 0"] > 0
