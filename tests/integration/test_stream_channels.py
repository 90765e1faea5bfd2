"""Stream channels of real sandboxes: processes outlive the stream gateway, and end with the sandbox."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from docker import APIClient

from tests.support.guest.stream_client import StreamClient
from tests.support.stack.daemons import Daemon, Daemons, bash, open_daemons
from tests.support.stack.stack import ROOT
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.workers.sandbox_client import SandboxClient
from toolcrew.workers.stream_channels import SandboxChannel, open_channel

pytestmark = pytest.mark.stack

GATEWAY = """
import asyncio, sys, time
from tests.support.guest.stream_client import StreamClient
from toolcrew.workers.sandbox_client import SandboxClient
from toolcrew.workers.stream_channels import open_channel

async def run():
    channel = await open_channel(sys.argv[1], sys.argv[2], 1)
    channel.sock.setblocking(True)
    client = StreamClient(channel.sock)
    client.begin_epoch()
    await channel.use(bytes_in=1, bytes_out=1, open_streams=1)
    process = client.open("process", argv=["sh", "-c", "echo started; sleep 30; echo late"], tag="kept")
    process.read_until(b"started")
    print("started", flush=True)
    time.sleep(99)

asyncio.run(run())
"""


@pytest.fixture(scope="module", params=["oci", "engine"])
def daemon(request: pytest.FixtureRequest, engine: APIClient) -> Iterator[Daemon]:
    with open_daemons(engine) as opened:
        yield opened.start(sandbox_start=request.param, idle_pause_s="0.3")


def connect(daemon: Daemon, name: str) -> tuple[SandboxChannel, StreamClient]:
    """Return the channel of a session, and a client that has begun an epoch."""
    channel = asyncio.run(open_channel(daemon.path, name, 1))
    channel.sock.setblocking(True)
    client = StreamClient(channel.sock)
    client.begin_epoch()
    return channel, client


def has_ended(channel: SandboxChannel) -> bool:
    channel.sock.settimeout(SOON_S)
    while data := channel.sock.recv(65_536):
        assert data
    return True


def start_gateway(daemon: Daemon, name: str) -> "subprocess.Popen[bytes]":
    """Start a gateway with a process of the session that runs for 30 s."""
    argv = [sys.executable, "-c", GATEWAY, str(daemon.path), name]
    gateway = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE)
    assert gateway.stdout is not None
    assert gateway.stdout.readline() == b"started\n"
    return gateway


def test_a_process_outlives_a_killed_gateway_and_the_calls_of_its_session(daemon: Daemon) -> None:
    with daemon.client() as client:
        name = client.open("acme", "kept")
        gateway = start_gateway(daemon, name)
        with pytest.raises(ToolFailure) as refused:
            connect(daemon, name)
        assert refused.value.code == ErrorCode.SESSION_BUSY
        assert b"here" in bash(client, name, "echo here > file; cat file").streams["merged"]
        gateway.send_signal(signal.SIGKILL)
        gateway.wait()
        with pytest.raises(ToolFailure) as refused:
            client.fork(name, ["acme:child"])
        assert refused.value.code == ErrorCode.SESSION_BUSY

        channel, streams = connect(daemon, name)
        [process] = streams.call("processes")["processes"]
        assert process["tag"] == "kept"
        attach: dict[str, Any] = {"process": process["process"], "from": "start"}
        attached = streams.open("attach", **attach)
        assert attached.read_until(b"started") == b"started\n"
        streams.call("signal", process=process["process"], signal=9, tree=True)
        assert attached.end()["signal"] == 9
        client.close(name)
        assert has_ended(channel)
        channel.close()


def test_a_session_with_a_process_of_a_stream_is_not_frozen_and_another_one_is(daemon: Daemon) -> None:
    with daemon.client() as client:
        busy, idle = client.open("acme", "busy"), client.open("acme", "idle")
        gateway = start_gateway(daemon, busy)
        channel, streams = connect(daemon, idle)
        gateway.kill()
        gateway.wait()
        wait_until(lambda: states(client)[idle] == "paused", SOON_S, "the session without processes is frozen")
        asyncio.run(channel.use(bytes_in=1, bytes_out=0, open_streams=0))
        streams.begin_epoch()
        assert states(client) == {busy: "ready", idle: "ready"}
        client.close(busy)
        client.close(idle)


def states(client: SandboxClient) -> dict[str, str]:
    return {row["name"]: row["state"] for row in client.sessions()}


def test_no_descriptor_remains_after_many_gateways(daemon: Daemon) -> None:
    with daemon.client() as client:
        name = client.open("acme", "many")
        pid = daemon.running.pid
        channel, _ = connect(daemon, name)
        channel.close()
        before = count_descriptors(pid)
        for _ in range(200):
            channel, _ = connect(daemon, name)
            channel.close()
        wait_until(lambda: count_descriptors(pid) <= before, SOON_S, "sandboxd has closed all connections")
        client.close(name)


def count_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("start", ["oci", "engine"])
def test_a_killed_sandboxd_ends_the_channel_and_the_session_gets_another_sandbox(daemons: Daemons, start: str) -> None:
    daemon = daemons.start(sandbox_start=start, sandbox_workspace="folder")
    with daemon.client() as client:
        name = client.open("acme", "s1")
        bash(client, name, "echo kept > file")
        channel, _ = connect(daemon, name)
    daemon.kill()
    assert has_ended(channel)
    with pytest.raises(SandboxUnavailable):
        asyncio.run(channel.use(bytes_in=1, bytes_out=0, open_streams=1))
    channel.close()
    daemon.start()
    channel, streams = connect(daemon, name)
    assert channel.generation == 2
    process = streams.open("process", argv=["cat", "file"])
    process.end()
    assert process.data == b"kept\n"
    channel.close()
