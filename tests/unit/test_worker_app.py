"""Which pool a worker's calls run in."""

from typing import Any

import pytest

from contract.errors import ConfigError
from workers.app import choose_pool
from workers.settings import WorkerSettings


def test_beside_sandboxes_calls_run_in_threads_and_else_in_processes_that_can_be_killed() -> None:
    assert (choose_pool("sandbox", "auto"), choose_pool("web", "auto")) == ("threads", "prefork")


def test_a_sandbox_worker_may_have_either_pool() -> None:
    assert [choose_pool("sandbox", "threads"), choose_pool("sandbox", "prefork")] == ["threads", "prefork"]


def test_threads_without_sandboxes_are_refused_for_nothing_could_end_a_tool() -> None:
    assert choose_pool("web", "prefork") == "prefork"
    with pytest.raises(ConfigError, match=r"TOOLCREW_WORKER_POOL=threads .* Unset it"):
        choose_pool("web", "threads")


@pytest.mark.parametrize(
    ("told", "slots"),
    [
        ({}, 16),
        ({"worker_pool": "prefork"}, 4),
        ({"worker_kind": "web"}, 4),
        ({"concurrency": 7}, 7),
        ({"worker_kind": "web", "concurrency": 9}, 9),
    ],
)
def test_a_thread_is_cheap_and_a_process_is_not(told: dict[str, Any], slots: int) -> None:
    assert WorkerSettings.model_validate({"redis_url": "redis://127.0.0.1", **told}).concurrency == slots
