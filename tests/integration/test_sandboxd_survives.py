"""Sessions outlive their sandboxd and their engine. After a kill or a stop, the next daemon of the same name serves
these sessions, and no others.
"""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from docker import APIClient

from tests.support.sandboxd.engine_stubs import relayed_engine
from tests.support.stack.daemons import Daemon, Daemons, bash, open_daemons, start_call, wait_running
from tests.support.stack.stack import missing
from tests.support.stack.waiting import SOON_S, wait_until, wait_until_async
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandbox_client import GuestResponse, SandboxClient

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def pooled(engine: APIClient) -> Iterator[Daemon]:
    """Shared by tests that leave the daemon unchanged."""
    with open_daemons(engine) as opened:
        yield opened.start(sandbox_workspace="auto", pool_size="2")


def need_images() -> None:
    if os.geteuid() != 0:
        missing("workspace images need root: run the tests as root")


def full_id(daemon: Daemon, answer: GuestResponse) -> str:
    return next(candidate for candidate in daemon.containers() if candidate.startswith(answer.done["sandbox"]["id"]))


def is_frozen(daemon: Daemon, container: str) -> bool:
    return daemon.containers().get(container) == "paused"


def test_sessions_of_a_killed_sandboxd_keep_their_files(daemons: Daemons) -> None:
    need_images()
    daemon = daemons.start(sandbox_workspace="image", idle_pause_s="0.3")
    with daemon.client() as client:
        busy, frozen = client.open("acme", "busy"), client.open("acme", "frozen")
        its_container = full_id(daemon, bash(client, busy, "echo busy > file"))
        other = full_id(daemon, bash(client, frozen, "echo frozen > file; export gone=yes"))
    in_flight = start_call(daemon, busy, "sleep 99")
    wait_running(its_container, "sleep 99")
    wait_until(lambda: is_frozen(daemon, other), SOON_S, "the idle session is frozen")

    daemon.kill()

    with pytest.raises(SandboxUnavailable, match="sandboxd does not answer"):
        in_flight.result(SOON_S)
    wait_until(
        lambda: its_container not in daemon.containers(),
        SOON_S,
        "the guest sees the end and its container goes by itself",
    )
    assert daemon.containers() == {other: "paused"}
    daemon.start()
    assert daemon.containers() == {}
    with daemon.client() as client:
        for name in (busy, frozen):
            answer = bash(client, name, 'cat file; echo "$gone"')
            assert answer.streams["merged"].decode().split() == [name.partition(":")[2]]
            assert answer.done["sandbox"]["rebuilt"] is True
            assert "the files in /workspace are kept" in answer.done["sandbox"]["news"]
        assert "news" not in bash(client, busy, "true").done["sandbox"]


@pytest.mark.parametrize("kind", ["image", "tmpfs"])
def test_sessions_of_a_stopped_sandboxd_keep_files_and_shell(daemons: Daemons, kind: str) -> None:
    if kind == "image":
        need_images()
    daemon = daemons.start(sandbox_workspace=kind)
    with daemon.client() as client:
        name = client.open("acme", "s")
        bash(
            client,
            name,
            "mkdir folder; echo content > folder/file; echo scratch > /tmp/file; export word=kept; cd folder",
        )

    assert daemon.stop() == 0

    assert daemon.containers() == {}
    daemon.start()
    with daemon.client() as client:
        answer = bash(client, name, 'pwd; cat file /tmp/file; echo "$word"')
    assert answer.streams["merged"].decode().split() == ["/workspace/folder", "content", "scratch", "kept"]
    assert answer.done["sandbox"]["rebuilt"] is False
    assert answer.done["sandbox"]["generation"] == 2


def test_a_paused_container_of_a_dead_sandboxd_is_removed_only_within_its_deployment(daemons: Daemons) -> None:
    """A frozen guest cannot notice the loss of its sandboxd, and that daemon is not restarted."""
    killed, neighbour = daemons.start("killed", idle_pause_s="0.3"), daemons.start("neighbour")
    with killed.client() as client:
        container = full_id(killed, bash(client, client.open("acme", "s"), "true"))
    with neighbour.client() as client:
        its_own = full_id(neighbour, bash(client, client.open("acme", "s"), "true"))
    wait_until(lambda: is_frozen(killed, container), SOON_S, "it is frozen")
    neighbour.signal(signal.SIGSTOP)

    killed.kill()

    daemons.start("foreign", deployment="another-deployment")  # the daemon has finished its sweep when it answers
    assert is_frozen(killed, container)
    neighbour.signal(signal.SIGCONT)
    wait_until(lambda: container not in killed.containers(), SOON_S, "the neighbour removes it")
    assert its_own in neighbour.containers()


def test_two_deployments_with_the_same_name_on_one_engine_do_not_interfere(daemons: Daemons) -> None:
    ours = daemons.start("ours")
    with ours.client() as client:
        name = client.open("acme", "s")
        container = full_id(ours, bash(client, name, "true"))
        theirs = daemons.describe("theirs", deployment="theirs")
        theirs.environment |= {
            "TOOLCREW_SANDBOXD_NAME": ours.name,
            "TOOLCREW_SANDBOXD_LEASES": str(daemons.folder / "other-leases"),
        }
        theirs.name = ours.name
        theirs.start()
        with theirs.client() as other:
            foreign = full_id(theirs, bash(other, other.open("acme", "s"), "true"))
        assert list(ours.containers()) == [container]
        assert list(theirs.containers()) == [foreign]

        assert theirs.stop() == 0

        assert theirs.containers() == {}
        assert full_id(ours, bash(client, name, "true")) == container


async def test_sessions_recover_after_an_engine_outage(daemons: Daemons) -> None:
    need_images()
    path = daemons.folder / "engine.sock"
    async with relayed_engine(path):
        daemon = await asyncio.to_thread(
            daemons.start, sandbox_workspace="image", sandbox_start="engine", docker_host=f"unix://{path}"
        )
        client = daemon.client()
        name = await asyncio.to_thread(client.open, "acme", "s")
        container = full_id(daemon, await asyncio.to_thread(bash, client, name, "echo content > file"))
        in_flight = asyncio.wrap_future(start_call(daemon, name, "sleep 99"))
        await asyncio.to_thread(wait_running, container, "sleep 99")

    done = (await asyncio.wait_for(in_flight, SOON_S)).done
    assert done["error"]["code"] == "SANDBOX_UNAVAILABLE"
    assert done["workspace_kept"] is True
    with pytest.raises(SandboxUnavailable, match="Docker engine"):
        await asyncio.to_thread(bash, client, name, "true")
    await wait_until_async(lambda: container not in daemon.containers(), SOON_S, "the guest ends with its channel")
    async with relayed_engine(path):
        answer = await wait_until_async(lambda: _try_bash(client, name, "cat file"), SOON_S, daemon.log)
        assert answer.streams["merged"] == b"content\n"
        assert answer.done["sandbox"]["rebuilt"] is True
        client.disconnect()
        assert await asyncio.to_thread(daemon.stop) == 0
    assert daemon.containers() == {}


def _try_bash(client: SandboxClient, name: str, script: str) -> GuestResponse | None:
    try:
        return bash(client, name, script)
    except SandboxUnavailable:
        return None


def test_a_warm_sandbox_is_clean_and_given_to_one_session_only(pooled: Daemon) -> None:
    look = (
        "ls -A /workspace /tmp /dev/shm; find /output -mindepth 1 -not -path '*/.state*'; set -- /proc/[0-9]*; echo $#"
    )
    states, looks = [], set()
    with pooled.client() as client:
        for number in range(3):
            wait_until(lambda: client.status()["pool"]["ready"] == 2, SOON_S, pooled.log)
            handed_out = client.status()["pool"]["handed_out"]
            name = client.open("acme", f"warm-{number}")
            assert client.status()["pool"]["handed_out"] == handed_out + 1
            answer = bash(client, name, look)
            looks.add(answer.streams["merged"].decode())
            states.append(full_id(pooled, answer))
            bash(client, name, "touch /workspace/x /tmp/x /dev/shm/x; sleep 99 & disown")
            client.close(name)
            assert states[-1] not in pooled.containers()

    assert len(set(states)) == 3
    (only,) = looks
    assert only.split()[:3] == ["/dev/shm:", "/tmp:", "/workspace:"], only
