"""A deployment with processes of a release that is too old for this release. Each side refuses the other side's
processes and reports the reason.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker import APIClient
from pydantic import SecretStr

from tests.support.redis.raw_queue import make_envelope, publish, stored_state
from tests.support.stack.earlier_release import unpack_incompatible_release
from tests.support.stack.host_harness import Harness, open_harness
from tests.support.stack.stack import ROOT, UP_S, end_process
from tests.support.stack.waiting import wait_until
from toolcrew.contract.calls import ToolCall
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.names import hosts_key, refusals_key
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.store.batches import batch_key

COMMAND = (sys.executable, "-m", "toolcrew.orchestrator")
"""toolcrew, of the release in whose tree the command starts."""
# Runs in the tree of the earlier release, and prints why no session was opened.
EARLIER_ORCHESTRATOR = """
import asyncio
from toolcrew import ToolClient, load_settings

async def main():
    async with ToolClient.connect(settings=load_settings()) as client:
        async with await client.open_session() as session:
            await session.call("bash_tool", {"command": "touch $TALLY/ran"})

try:
    asyncio.run(main())
except Exception as error:
    print(error)
"""

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_incompatible_release(tmp_path_factory.mktemp("earlier"))


@pytest.fixture(scope="module")
def new_host(engine: APIClient) -> Iterator[Harness]:
    with open_harness(engine, "new") as opened:
        yield opened


@pytest.fixture(scope="module")
def old_host(engine: APIClient, earlier: Path) -> Iterator[Harness]:
    with open_harness(engine) as opened:
        opened.start_host("old", earlier, pool_size="0")
        opened.wait_ready()
        yield opened


def run_in(tree: Path, harness: Harness, *argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        argv, cwd=tree, env=harness.environment(), capture_output=True, text=True, timeout=UP_S, check=False
    )


def assert_nothing_ran(harness: Harness) -> None:
    assert list(harness.tally.iterdir()) == []
    assert harness.footprint.containers() == []


def test_an_earlier_orchestrator_refuses_hosts_of_this_release(new_host: Harness, earlier: Path) -> None:
    done = run_in(earlier, new_host, sys.executable, "-c", EARLIER_ORCHESTRATOR)
    assert "every host runs another release" in done.stdout, done.stdout + done.stderr[-2000:]
    assert_nothing_ran(new_host)


async def test_an_orchestrator_of_this_release_refuses_earlier_hosts(old_host: Harness) -> None:
    settings = OrchestratorSettings(redis_url=SecretStr(old_host.redis_url), deployment=old_host.deployment)
    with pytest.raises(ConfigError, match=r"no worker has published its tools|run the same release"):
        async with ToolClient.connect(settings=settings) as client:
            await client.open_session()
    assert_nothing_ran(old_host)


def test_a_call_of_an_earlier_release_is_refused_by_a_host_of_this_release(new_host: Harness) -> None:
    """Such a call lies in a queue when its host is upgraded without a drain."""
    call = ToolCall(id="left-over", name="bash_tool", arguments={"command": "touch $TALLY/ran"})
    with new_host.open_redis() as store:
        queue = store.zrange(hosts_key(new_host.deployment), 0, -1)[0].decode()  # type: ignore[index]
        envelope = make_envelope(new_host.broker, call, tenant="default", session="s1").replace("v3.", "v2.", 1)
        task = publish(new_host.broker, "tool.bash_tool", queue, envelope)
        state = wait_until(lambda: stored_state(store, task), UP_S, new_host.log_tails)
        assert (state["status"], state["result"]["exc_type"]) == ("FAILURE", "EnvelopeRefused")
        assert "same release" in str(state["result"]["exc_message"])
        assert store.hget(refusals_key(new_host.deployment), "version") == b"1"
    assert_nothing_ran(new_host)


@pytest.mark.parametrize(
    "submits_earlier", [True, False], ids=["submitted by the earlier release", "executed by the earlier release"]
)
def test_no_orchestrator_executes_a_batch_on_hosts_of_the_other_release(
    new_host: Harness, old_host: Harness, earlier: Path, tmp_path: Path, submits_earlier: bool
) -> None:
    submits, works, harness = (earlier, ROOT, old_host) if submits_earlier else (ROOT, earlier, new_host)
    line = {"custom_id": "one", "method": "POST", "url": "/v1/tools/execute"}
    body = {"name": "bash_tool", "arguments": {"command": "touch $TALLY/ran"}}
    (tmp_path / "in.jsonl").write_text(json.dumps({**line, "body": body}) + "\n")
    submitted = run_in(
        submits,
        harness,
        *COMMAND,
        "batches",
        "submit",
        str(tmp_path / "in.jsonl"),
        "--id",
        "upgrade",
        "--detach",
    )
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    log_file = tmp_path / "service.log"
    with log_file.open("wb") as log:
        argv = [*COMMAND, "serve", "batches", "--no-traces"]
        serving = subprocess.Popen(
            argv, cwd=works, env=harness.environment({"TOOLCREW_APPROVALS": "auto"}), stdout=log, stderr=log
        )
    try:
        # The service waits for hosts of its own release.
        wait_until(
            lambda: re.search("pool_not_available|serving", log_file.read_text()),
            UP_S,
            log_file.read_text,
        )
    finally:
        end_process(serving, UP_S)
    key = batch_key(harness.deployment, "default", "upgrade")
    with harness.open_redis() as store:
        assert store.hget(key, "state") == b"in_progress"
    assert_nothing_ran(harness)
