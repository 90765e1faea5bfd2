"""Checkpoints of sessions with root inside, restored by another sandboxd: the whole root file system is as it was."""

import pytest

from tests.chaos.forks import SETTINGS as STACKED
from tests.chaos.forks import close_all
from tests.support.stack.daemons import Daemon, Daemons, bash, run_script
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.workers.sandbox_client import SandboxClient

pytestmark = [pytest.mark.stack, pytest.mark.usefixtures("needs_root")]

CHANGE = r"""
set -e
useradd --create-home --uid 4321 eve
echo new > /etc/motd; chown eve /etc/motd; chmod 4750 /etc/motd
rm /etc/issue
rm -r /usr/share/base-files; echo file > /usr/share/base-files
rm -r /usr/share/common-licenses; mkdir /usr/share/common-licenses; echo only > /usr/share/common-licenses/only
mkdir -p /usr/local/lib/pkg/deep; echo code > /usr/local/lib/pkg/m.py; ln -s m.py /usr/local/lib/pkg/link
ln /usr/local/lib/pkg/m.py /usr/local/lib/pkg/same; truncate -s 50M /usr/local/lib/pkg/sparse
printf x > "$(printf '/srv/-rf \n\377')"; chmod 711 /srv; chown eve:eve /var/mail; touch -d @981173106 /etc/hosts
cp /bin/tar /usr/local/bin/tar; rm -f /bin/bzip2; mv /etc/debian_version /etc/renamed
ln -sfn /var/other /var/lock; mkfifo /var/fifo; head -c 6000000 /dev/urandom > /var/large
echo work > /workspace/f; chown eve /workspace/f; echo out > /output/o; echo scratch > /tmp/t
cd /srv; export COLOUR=blue
"""
SURVEY = r"""
cd /; find . -xdev \( -path ./tmp -o -path ./output -o -path ./workspace \) -prune -o \
    \( -type d -printf '%p %y %m %U %G\n' -o -printf '%p %y %m %U %G %s %l %T@ %n\n' \) | sort > $1
find . -xdev \( -path ./tmp -o -path ./output \) -prune -o -newer /bin/ls -type f -exec md5sum {} + | sort >> $1
"""
"""Every name of the root file system with its attributes, and the content of what is newer than the image."""


def survey(client: SandboxClient, name: str, place: str) -> None:
    assert run_script(client, name, f"survey() ({SURVEY}); survey {place}") == ""


@pytest.fixture
def pair(daemons: Daemons) -> tuple[Daemon, Daemon]:
    store = str(daemons.folder / "store")
    one, two = (daemons.start(name, **STACKED["oci-root"], workspace_store=store, pool_size="0") for name in "ab")
    return one, two


def test_a_moved_session_keeps_its_whole_root_file_system(pair: tuple[Daemon, Daemon]) -> None:
    one, two = pair
    with one.client() as client:
        name = client.open("acme", "s1")
        assert run_script(client, name, CHANGE) == ""
        survey(client, name, "/workspace/before")
    assert one.stop() == 0  # its container is removed; its changes are on its disk
    one.start()
    with one.client() as client:
        checkpoint = client.checkpoint(name, automatic=True)["checkpoint"]
    one.kill()

    with two.client() as client:
        name = client.open("acme", "s1", SessionSpec(restore=checkpoint), moved={"generation": 2})
        answer = bash(client, name, "pwd; echo $COLOUR; ls /tmp /output")
        assert answer.streams["merged"].decode().split() == ["/srv", "blue", "/output:", "o", "/tmp:", "t"]
        assert "outside of /workspace" not in answer.done["sandbox"]["news"]
        survey(client, name, "/tmp/after")
        assert run_script(client, name, "diff /workspace/before /tmp/after") == ""
        look = "stat -c '%U %a' /workspace/f /etc/motd; cat /etc/motd /usr/local/lib/pkg/same"
        assert run_script(client, name, look).split() == ["eve", "644", "eve", "4750", "new", "code"]
        # A checkpoint of the restored session has all of it again.
        again = client.open("acme", "s2", SessionSpec(restore=client.checkpoint(name)["checkpoint"]))
        survey(client, again, "/tmp/after")
        assert run_script(client, again, "diff /workspace/before /tmp/after") == ""
    close_all(two)


def test_a_checkpoint_of_a_fork_has_the_changes_of_all_its_layers(pair: tuple[Daemon, Daemon]) -> None:
    one, two = pair
    with one.client() as client:
        name = client.open("acme", "s1")
        assert run_script(client, name, CHANGE) == ""
        client.fork(name, ["acme:child"])
        more = "rm -r /usr/local/lib/pkg; mkdir /usr/local/lib/pkg; echo 2 > /etc/motd; rm /etc/renamed; userdel -r eve"
        run_script(client, "acme:child", more)
        client.fork("acme:child", ["acme:grandchild"])
        run_script(client, "acme:grandchild", "echo 3 > /usr/local/lib/pkg/n; echo back > /etc/issue; mkdir /home/eve")
        survey(client, "acme:grandchild", "/workspace/before")
        checkpoint = client.checkpoint("acme:grandchild")["checkpoint"]
    with two.client() as client:
        name = client.open("acme", "restored", SessionSpec(restore=checkpoint))
        survey(client, name, "/tmp/after")
        assert run_script(client, name, "diff /workspace/before /tmp/after; cat /etc/issue") == "back\n"
    for daemon in pair:
        close_all(daemon)


def test_a_checkpoint_can_be_created_while_files_appear_and_disappear(pair: tuple[Daemon, Daemon]) -> None:
    one, _ = pair
    with one.client() as client:
        name = client.open("acme", "s1")
        run_script(client, name, CHANGE)
        churn = "while :; do for i in $(seq 50); do echo > /etc/x$i; mkdir -p /etc/d$i/e; done; rm -rf /etc/x* /etc/d*; done"
        request = {"op": "job_start", "script_bytes": len(churn), "cwd": None, "label": "churn", "wait_ms": 0}
        job = client.call(name, {**request, "max_bytes": 8192, "timeout_s": 5.0}, churn.encode()).done["job"]
        checkpoints = [client.checkpoint(name)["checkpoint"] for _ in range(5)]
        client.call(name, {"op": "job_kill", "job": job["job"], "max_bytes": 0, "timeout_s": 5.0})
        restored = client.open("acme", "s2", SessionSpec(restore=checkpoints[-1]))
        assert run_script(client, restored, "cat /usr/local/lib/pkg/m.py") == "code\n"
    close_all(one)


@pytest.mark.parametrize(
    ("settings", "opened"),
    [
        (STACKED["oci"], {}),
        ({"sandbox_start": "engine", "sandbox_workspace": "image"}, {}),
        (STACKED["oci-root"], {"image": "toolcrew-sandbox-python:dev"}),
    ],
    ids=["without root inside", "started by the engine", "another image"],
)
def test_root_changes_that_cannot_be_restored_are_reported_and_the_workspace_is_restored(
    daemons: Daemons, settings: dict[str, str], opened: dict[str, str]
) -> None:
    store = str(daemons.folder / "store")
    one = daemons.start("a", **STACKED["oci-root"], workspace_store=store, pool_size="0")
    allowed = '["toolcrew-sandbox-python:dev"]'
    two = daemons.start("b", **settings, workspace_store=store, pool_size="0", sandbox_images_allowed=allowed)
    with one.client() as client:
        name = client.open("acme", "s1")
        run_script(client, name, CHANGE)
        checkpoint = client.checkpoint(name)["checkpoint"]
    with two.client() as client:
        restored = client.open("acme", "s2", SessionSpec(restore=checkpoint, **opened))
        answer = bash(client, restored, "cat /workspace/f; ls /etc/issue /srv")
        assert answer.streams["merged"].decode().split() == ["work", "/etc/issue", "/srv:"]
        assert "outside of /workspace" in answer.done["sandbox"]["news"]
        assert "news" not in bash(client, restored, "true").done["sandbox"]
    for daemon in (one, two):
        close_all(daemon)
