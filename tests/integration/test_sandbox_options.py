"""Sizes and user that sessions ask for, seen from the host and from inside, by both starts of a sandbox."""

import json
import os
from io import BytesIO
from typing import Any

import pytest
from docker import APIClient

from tests.support.sandboxd.containers import Watched, python, watch
from tests.support.stack.daemons import Daemon, Daemons, bash, run_script
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.session_spec import SandboxOptions, SessionSpec
from toolcrew.contract.tenancy import SandboxPolicy
from toolcrew.orchestrator.api.sessions import NewSession
from toolcrew.orchestrator.batches.lines import read_lines
from toolcrew.orchestrator.cli.session_options import parse_options

pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(os.geteuid() != 0, reason="disk images and the OCI start need root"),
]

MIB = 1024 * 1024
CLASSES = {
    "default": {"largest": {"cpus": 2, "memory_bytes": 512 * MIB, "workspace_bytes": 64 * MIB, "pids": 300}},
    "plain": {},
}
FILL = "for i in {{1..9}}; do head -c 5M /dev/zero >{}/$i; done"
"""Writes more than the disk of a test. One file cannot be larger than the disk."""
FORK = python(
    """
import os, signal
children = 0
try:
    while children < 100:
        if os.fork() == 0:
            signal.pause()
        children += 1
except BlockingIOError:
    print(children)
"""
)
OPTIONS = SandboxOptions(cpus=0.5, memory_bytes=300 * MIB, workspace_bytes=8 * MIB, pids=40)


def start(daemons: Daemons, sandbox_start: str, classes: dict[str, Any], **settings: str) -> Daemon:
    return daemons.start(
        **{
            "sandbox_start": sandbox_start,
            "sandbox_workspace": "image",
            "tenant_classes": json.dumps(classes),
            "pool_size": "0",
            **settings,
        }
    )


def read_sizes(watched: Watched) -> dict[str, float]:
    """Return the limits that the kernel enforces."""
    if watched._cgroup_version == 2:
        quota, period = watched.cgroup_file("cpu", "", "cpu.max").read_text().split()
    else:
        quota, period = (
            watched.cgroup_file("cpu", f"cpu.cfs_{name}_us", "").read_text() for name in ("quota", "period")
        )
    memory = watched.cgroup_file("memory", "memory.limit_in_bytes", "memory.max").read_text()
    pids = watched.cgroup_file("pids", "pids.max", "pids.max").read_text()
    return {"cpus": int(quota) / int(period), "memory_bytes": int(memory), "pids": int(pids)}


@pytest.mark.parametrize("sandbox_start", ["oci", "engine"])
def test_a_sandbox_has_the_sizes_that_its_session_requests(
    engine: APIClient, daemons: Daemons, sandbox_start: str
) -> None:
    daemon = start(daemons, sandbox_start, CLASSES, pool_size="1")
    wait_until(lambda: daemon.status()["pool"]["ready"] == 1, SOON_S, daemon.log)
    with daemon.client() as client:
        opened = client.describe_open("acme:s", SessionSpec(ttl_s=600.0).with_defaults(OPTIONS))
        assert opened["options"] == {**OPTIONS.model_dump(), "user": "sandbox"}
        assert daemon.status()["pool"]["handed_out"] == 0
        sandbox = watch(engine, opened["sandbox"]["id"])
        kernel = {"cpus": 0.5, "memory_bytes": 300 * MIB, "pids": 40}
        assert read_sizes(sandbox) == kernel

        written = run_script(client, "acme:s", f"{FILL.format('/workspace')}; du -k /workspace | tail -1")
        assert "No space left on device" in written
        assert 7 * MIB < int(written.split()[-2]) * 1024 < 9 * MIB
        forked = run_script(client, "acme:s", f"rm /workspace/?; echo kept >/workspace/file; {FORK}")
        assert 10 < int(forked) <= 40
        assert sandbox.pids_refused() > 0

        # The sandbox of the pool has the sizes of the class, so it fits a session that asks for nothing.
        other = client.describe_open("acme:t", SessionSpec(ttl_s=600.0))
        assert daemon.status()["pool"]["handed_out"] == 1
        assert read_sizes(watch(engine, other["sandbox"]["id"]))["pids"] == 256

    daemon.kill()
    daemon.start()
    with daemon.client() as client:
        answer = bash(client, "acme:s", "cat /workspace/file; df -k --output=size /workspace | tail -1")
        flags, size = answer.streams["merged"].split()
        assert flags == b"kept"
        assert 7 * MIB < int(size) * 1024 < 9 * MIB
        assert read_sizes(watch(engine, answer.done["sandbox"]["id"])) == kernel


@pytest.mark.parametrize("sandbox_start", ["oci", "engine"])
def test_a_sandbox_has_the_host_name_that_its_session_requests(daemons: Daemons, sandbox_start: str) -> None:
    line = read_lines(BytesIO(b'{"id": "a", "tool": "bash_tool", "hostname": "box-1"}'), None, "the body").items[0]
    api = NewSession.model_validate_json('{"hostname": "box-1"}')
    for options in (parse_options("hostname=box-1"), api, line.environment):
        assert options.hostname == "box-1"
    daemon = start(daemons, sandbox_start, CLASSES, pool_size="1")
    wait_until(lambda: daemon.status()["pool"]["ready"] == 1, SOON_S, daemon.log)
    with daemon.client() as client:
        named = client.open("acme", "named", SessionSpec(hostname="box-1"))
        assert run_script(client, named, "uname -n; cat /etc/hostname") == "box-1\nbox-1\n"
        if sandbox_start == "oci":  # with the engine, a sandbox without a network has no entry of its own
            assert run_script(client, named, "getent hosts box-1 | wc -l") == "1\n"
        assert run_script(client, client.open("acme", "own"), "uname -n") == "sandbox\n"
        for name in ("-a", "a.b", "a" * 64, "a\n"):
            with pytest.raises(ToolFailure, match="hostname"):
                client.open("acme", "wrong", SessionSpec.model_construct(hostname=name))


@pytest.mark.parametrize(
    ("terms", "options"),
    [
        (SandboxPolicy(), SandboxOptions(pids=301)),
        (SandboxPolicy(), SandboxOptions(user="root")),
        (SandboxPolicy(tenant_class="plain"), SandboxOptions(cpus=1.5)),
        (SandboxPolicy(workspace_bytes=16 * MIB), SandboxOptions(workspace_bytes=32 * MIB)),
    ],
)
def test_session_options_above_the_class_or_policy_limit_are_refused(
    daemons: Daemons, terms: SandboxPolicy, options: SandboxOptions
) -> None:
    daemon = start(daemons, "auto", CLASSES)
    with daemon.client() as client:
        with pytest.raises(ToolFailure, match=f"class '{terms.tenant_class}'") as refused:
            client.open("acme", "s", SessionSpec().with_defaults(options), policy=terms)
        assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
        assert client.status()["sessions"] == 0


def test_a_session_is_root_inside_only_if_requested_and_allowed_by_its_class(
    engine: APIClient, daemons: Daemons
) -> None:
    daemon = start(daemons, "oci", {"default": {"largest": {"user": "root"}}, "plain": {}})
    with daemon.client() as client:
        root = client.open("acme", "root", SessionSpec(user="root", workspace_bytes=32 * MIB))
        assert run_script(client, root, "id -u; touch /etc/mine && stat -c %u /etc/mine").split() == ["0", "0"]
        # The disk holds all that root writes.
        full = run_script(client, root, f"{FILL.format('/usr')}; rm /usr/[1-9]; id -u")
        assert "No space left on device" in full
        assert full.split()[-1] == "0"
        own = client.open("acme", "own")
        assert run_script(client, own, "exec 2>&1; id -u; touch /etc/mine").split()[0] == "1000"
        with pytest.raises(ToolFailure, match="may not run as root"):
            client.open("acme", "plain", SessionSpec(user="root"), policy=SandboxPolicy(tenant_class="plain"))
    daemon.kill()
    daemon.start()
    with daemon.client() as client:
        assert run_script(client, root, "id -u; stat -c %u /etc/mine").split() == ["0", "0"]
