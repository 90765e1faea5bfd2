"""/tmp and the home of a session's user: programs run there, and no more fits than on the session's own disk."""

import json
from collections.abc import Iterator

import pytest
from docker import APIClient

from tests.support.sandboxd.attack_sandboxd import HostileSession, OwnSandboxd, open_own_sandboxd
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.workers.sandbox_client import SandboxClient

pytestmark = pytest.mark.stack

DISK_BYTES = 32 * 1024 * 1024
PLACES = ("/workspace", "/tmp", "/home/sandbox")


@pytest.fixture(scope="module")
def small(start: str, engine: APIClient) -> Iterator[OwnSandboxd]:
    classes = {"default": {"workspace_bytes": DISK_BYTES}}
    settings = {"TOOLCREW_TENANT_CLASSES": json.dumps(classes), "TOOLCREW_SANDBOX_START": start}
    with open_own_sandboxd(engine, {**settings, "TOOLCREW_SANDBOX_WORKSPACE": "image"}) as opened:
        yield opened


@pytest.fixture
def session(small: OwnSandboxd) -> Iterator[HostileSession]:
    with small.session() as opened:
        yield opened


def output(session: HostileSession, script: str) -> str:
    return session.bash(script).streams.get("merged", b"").decode(errors="replace")


def test_all_folders_together_hold_no_more_than_the_disk(session: HostileSession) -> None:
    """Aim: use more of the host's disk or memory than the session's own disk has."""
    script = "for file in {/tmp,~,/workspace}/fill{1,2}; do dd if=/dev/zero of=$file bs=64K; done 2>&1"
    assert "No space left on device" in output(session, script)

    root = session.watched.root
    held = sum(file.stat().st_blocks * 512 for place in PLACES for file in (root / place[1:]).glob("fill*"))
    assert 0.9 * DISK_BYTES < held < 1.1 * DISK_BYTES
    assert session.is_usable()


def test_programs_run_in_every_folder_without_more_rights(session: HostileSession) -> None:
    """Aim: use a setuid file or a device of the session's own folders."""
    script = r"""
for place in /tmp ~ /workspace; do
    printf '#!/bin/sh\necho runs\n' > $place/program; chmod 4755 $place/program; $place/program
    mknod $place/device b 7 0 2>/dev/null && echo made
done"""
    assert output(session, script).split() == ["runs"] * 3
    mounts = [line.split() for line in session.watched.mounts().splitlines()]
    options = {fields[4]: set(fields[5].split(",")) for fields in mounts if fields[4] in PLACES}
    assert set(options) == set(PLACES)
    assert all({"nosuid", "nodev"} <= found and "noexec" not in found for found in options.values())
    assert output(session, "stat -c '%a %U' /tmp ~ /workspace").splitlines() == [
        "1777 root",
        "700 sandbox",
        "755 sandbox",
    ]


def test_the_user_has_a_name_and_a_home_outside_of_the_workspace(session: HostileSession) -> None:
    script = (
        "echo $USER $LOGNAME $HOME ~; id -un; id -gn; getent passwd 1000 | cut -d: -f6; git init -q . && mkdir ~/.cache"
    )
    expected = ["sandbox", "sandbox", "/home/sandbox", "/home/sandbox", "sandbox", "sandbox", "/home/sandbox"]
    assert output(session, script).split() == expected
    assert output(session, "git status --porcelain") == ""


def test_a_checkpoint_has_the_home_and_tmp(small: OwnSandboxd, session: HostileSession) -> None:
    assert output(session, "echo a > ~/.rc; mkdir -p /tmp/d; echo b > /tmp/d/f; chmod 700 /tmp/d; echo c > f") == ""
    with SandboxClient(small.path) as client:
        checkpoint = client.checkpoint(session.name)["checkpoint"]
        restored = HostileSession(
            small.path, client, small.api, client.open("acme", "s2", SessionSpec(restore=checkpoint))
        )
        look = "cat ~/.rc /tmp/d/f f; stat -c %a /tmp /tmp/d ~"
        assert output(restored, look).split() == ["a", "b", "c", "1777", "700", "700"]
        restored.close()
