"""Sandboxes that end in any way leave nothing on the host, in sandboxd or in the engine. scripts/bench kill_rounds
plays a thousand rounds.
"""

import pytest
from docker import APIClient

from benchmarks.kill_rounds import WAYS, Rounds
from tests.support.stack.daemons import Daemon, Daemons, bash, start_call, wait_running
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.contract.session_spec import SessionSpec

pytestmark = pytest.mark.stack

ROUNDS = 20


def test_twenty_rounds_of_every_kind_of_end_leave_nothing_and_leak_no_resources(
    daemons: Daemons, engine: APIClient
) -> None:
    daemon = daemons.start(sandbox_workspace="auto")
    played = Rounds(daemon.running, engine)
    played.play(range(len(WAYS)))
    assert played.settle(SOON_S) == {}
    before = played.resources()

    played.play(range(len(WAYS), len(WAYS) + ROUNDS))

    assert played.settle(SOON_S) == {}
    after = played.resources()
    assert set(played.done) == set(WAYS)
    assert daemon.status()["sessions"] == 0
    assert daemon.status()["room"]["taken"] == 0
    # Connections to the engine and threads stay open for later calls, more of them on a busy host. A leak would add
    # at least one for each round.
    assert after.threads < before.threads + ROUNDS - 2, (before, after)
    assert after.files < before.files + ROUNDS - 2, (before, after)
    assert after.rss - before.rss < 16 * 2**20, (before, after)


def test_a_sandboxd_killed_during_starts_and_calls_leaves_nothing_after_the_next_one(
    daemons: Daemons, engine: APIClient
) -> None:
    daemon = daemons.start(sandbox_workspace="auto", pool_size="2", idle_pause_s="0.3")
    played = Rounds(daemon.running, engine)
    _fill(daemon, played, engine)
    assert set(played.traces.left(daemon.running, engine)) >= {"containers", "processes", "records"}, (
        "nothing could be found left"
    )
    for number in range(4):  # the `leave` way: opens without a waiting caller, some still in progress at the kill
        played.play([number * len(WAYS) + WAYS.index("leave")])

    daemon.kill()

    daemon.environment["TOOLCREW_POOL_SIZE"] = "0"
    daemon.start()
    assert daemon.containers() == {}
    assert daemon.stop(for_good=True) == 0
    assert Rounds(daemon.running, engine).traces.left(daemon.running, engine) == {}
    assert played.settle(SOON_S) == {}


def _fill(daemon: Daemon, played: Rounds, engine: APIClient) -> None:
    """Open a session with a call, and a frozen session."""
    with daemon.client() as client:
        busy, idle = client.open("acme", "busy"), client.open("acme", "idle")
        for name in (busy, idle):
            played.traces.learn(engine, str(bash(client, name, "echo x > file").done["sandbox"]["id"]))
    container = next(candidate for candidate in daemon.containers() if candidate.startswith(str(_id_of(daemon, busy))))
    start_call(daemon, busy, "sleep 99")
    wait_running(container, "sleep 99")
    wait_until(lambda: "paused" in daemon.states().values(), SOON_S, "the idle one is frozen")


def _id_of(daemon: Daemon, name: str) -> str:
    with daemon.client() as client:
        return str(client.describe_open(name, SessionSpec(ttl_s=600.0))["sandbox"]["id"])
