"""Tasks of `toolcrew.celery` in a user's Celery application, on real workers of both sides."""

import os
import signal
import uuid
from collections.abc import Iterator

import pytest
from celery import Celery, chord
from celery.exceptions import TimeoutError as ResultTimeout

from tests.support.redis.redis_harness import open_server
from tests.support.stack.api_stack import ApiStack
from tests.support.stack.celery_shop import collect, connect, running_worker
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew import Client
from toolcrew.celery import PoolError, call_tool, run_agent, submit_batch

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def shop(api_stack: ApiStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Celery]:
    folder = tmp_path_factory.mktemp("shop")
    environment = {"TOOLCREW_URL": api_stack.apis[0].url, "TOOLCREW_API_KEY": api_stack.keys["acme"]}
    with open_server() as server, running_worker(server.url(), folder, environment):
        yield connect(server.url())


@pytest.fixture
def client(api_stack: ApiStack) -> Iterator[Client]:
    with Client(api_stack.apis[0].url, api_stack.keys["acme"]) as opened:
        yield opened


def test_a_chord_collects_the_answers_of_runs(shop: Celery) -> None:
    runs = [run_agent.s("[item steps]"), run_agent.s("say hello"), run_agent.s("say hello again")]
    answers = chord([run.set(ignore_result=False) for run in runs])(collect.s()).get(timeout=SOON_S)
    assert answers == ["4 steps", "Hello.", "Hello."]


def test_a_task_that_is_delivered_again_runs_nothing_twice(shop: Celery, client: Client) -> None:
    with client.sessions.open() as session:
        task_id = str(uuid.uuid4())
        arguments = (session.id, "bash_tool", {"command": "echo run >>/tmp/runs; wc -l </tmp/runs"})
        for _ in range(2):
            task = call_tool.apply_async(arguments, task_id=task_id, ignore_result=False)
            assert task.get(timeout=SOON_S)["output"].strip() == "1"
        failed = call_tool.apply_async((session.id, "bash_tool", {"command": 3}), ignore_result=False)
        assert failed.get(timeout=SOON_S)["success"] is False
    run_ids = set()
    task_id = str(uuid.uuid4())
    for _ in range(2):
        task = run_agent.apply_async(("say hello",), task_id=task_id, ignore_result=False)
        run_ids.add(task.get(timeout=SOON_S)["id"])
    assert len(run_ids) == 1


def test_the_death_of_the_process_of_a_task_loses_no_run(shop: Celery, client: Client) -> None:
    before = {run.id for run in client.runs.list()}
    task = run_agent.apply_async(("[item sleeps]",), ignore_result=False)
    wait_until(lambda: len({run.id for run in client.runs.list()} - before) == 1, SOON_S, "the run was started")
    (run,) = {run.id for run in client.runs.list()} - before
    ((worker,),) = [answer.values() for answer in shop.control.broadcast("stats", reply=True, limit=1, timeout=SOON_S)]
    for process in worker["pool"]["processes"]:
        os.kill(process, signal.SIGKILL)
    with pytest.raises(ResultTimeout):
        task.get(timeout=3)
    client.runs.cancel(run)
    assert task.get(timeout=SOON_S)["id"] == run
    assert {run.id for run in client.runs.list()} - before == {run}


def test_a_batch_ends_before_its_task_and_errors_have_codes(shop: Celery, client: Client) -> None:
    lines = [{"id": name, "instruction": f"say hello to {name}"} for name in ("a", "b")]
    options = {"name": "nightly", "concurrency": 2}
    submitted = submit_batch.apply_async((lines, options), {"wait": True}, ignore_result=False).get(timeout=SOON_S)
    assert (submitted["status"], submitted["request_counts"]["completed"], submitted["name"]) == (
        "completed",
        2,
        "nightly",
    )
    assert client.batches.get(submitted["id"]).status == "completed"
    with pytest.raises(PoolError) as refused:
        call_tool.apply_async(("no-such-session", "bash_tool", {"command": "true"}), ignore_result=False).get(
            timeout=SOON_S
        )
    assert refused.value.args[0] == "SESSION_NOT_FOUND"
    with pytest.raises(PoolError) as invalid:
        run_agent.apply_async(("say hello", {"no_such_field": 1}), ignore_result=False).get(timeout=SOON_S)
    assert invalid.value.args[0] == "INVALID_ARGUMENTS"


def test_celery_commands_ask_the_workers_of_the_pool(api_stack: ApiStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", api_stack.stack.redis_url)
    import toolcrew.celery

    (answer,) = toolcrew.celery.app.control.broadcast("ping", reply=True, limit=1, timeout=SOON_S)
    assert list(answer.values()) == [{"ok": "pong"}]
