"""Forks of sessions on real sandboxds: what forks share, what they do not share, and what is left of them."""

import io
import json
import random
import secrets
from pathlib import Path

import pytest

from tests.chaos.forks import SETTINGS as STACKED
from tests.chaos.forks import Tree, close_all
from tests.support.stack.daemons import Daemon, Daemons, bash, run_script
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.orchestrator.batches.displays import JsonLines
from toolcrew.orchestrator.batches.lines import load_lines
from toolcrew.orchestrator.runs.client_batches import RowPaths
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.workers.sandboxd.forks import MERGED_LAYERS

pytestmark = [pytest.mark.stack, pytest.mark.usefixtures("needs_root")]

SETTINGS = {
    **STACKED,
    "engine-image": {"sandbox_start": "engine", "sandbox_workspace": "image"},
    "engine-tmpfs": {"sandbox_start": "engine", "sandbox_workspace": "tmpfs"},
}
FILL = """
mkdir -p sub/deep gone && echo base > sub/file && echo lost > gone/file && ln -s sub/file link && chmod 700 sub/deep
echo scratch > /tmp/file; export COLOUR=blue; greet() { echo "hello $1"; }; cd sub
"""
LOOK = 'pwd; echo "$COLOUR"; greet you; cat /tmp/file file ../gone/file; readlink ../link; stat -c %a deep'
SEEN = ["/workspace/sub", "blue", "hello", "you", "scratch", "base", "lost", "sub/file", "700"]


@pytest.fixture(params=SETTINGS)
def daemon(request: pytest.FixtureRequest, daemons: Daemons) -> Daemon:
    return daemons.start(**SETTINGS[request.param])


@pytest.fixture(params=STACKED)
def stacking(request: pytest.FixtureRequest, daemons: Daemons) -> Daemon:
    return daemons.start(**SETTINGS[request.param])


def test_forks_start_with_files_and_shell_state_and_then_diverge(daemon: Daemon) -> None:
    with daemon.client() as client:
        name, children = client.open("acme", "parent"), ["acme:a", "acme:b"]
        run_script(client, name, FILL)

        client.fork(name, children)

        for child in children:
            answer = bash(client, child, LOOK)
            assert answer.streams["merged"].decode().split() == SEEN
            sandbox = answer.done["sandbox"]
            assert (sandbox["generation"], sandbox["rebuilt"], sandbox.get("news")) == (1, False, None)
        change = "echo {0} >> file; rm -r ../gone; mv deep {0}; export COLOUR={0}; echo {0} > /tmp/file"
        for session in (*children, name):
            assert run_script(client, session, change.format(session[5:])) == ""
        for session in (*children, name):
            own = session[5:]
            answer = bash(
                client, session, 'cat file; ls ..; ls -d deep a b parent 2>/dev/null; echo "$COLOUR"; cat /tmp/file'
            )
            assert answer.streams["merged"].decode().splitlines() == ["base", own, "link", "sub", own, own, own]
            assert answer.done["sandbox"]["rebuilt"] is False
    close_all(daemon)


def test_a_tree_of_forks_outlives_its_inner_sessions(stacking: Daemon) -> None:
    with stacking.client() as client:
        line = [client.open("acme", "root")]
        for depth in range(5):
            run_script(client, line[-1], f"echo {depth} >> log; echo {depth} > f{depth}; rm -f f{depth - 2}")
            child = f"acme:n{depth}"
            client.fork(line[-1], [child, f"acme:unused{depth}"])
            line.append(child)
        for name in line[:-1]:
            client.close(name)
        assert run_script(client, line[-1], "cat log; ls").split() == [*"01234", "f3", "f4", "log"]
        assert run_script(client, "acme:unused1", "cat log; ls").split() == [*"01", "f0", "f1", "log"]
        used = [path for path in (stacking.state / "workspaces").glob("*") if path.name != ".templates"]
        held = {path.name: sum(file.stat().st_blocks * 512 for file in path.rglob("*")) for path in used}
        assert max(held.values()) < 1024 * 1024
        archive = run_script(client, line[-1], "tar c . | tar t | sort").split()
        assert archive == ["./", "./f3", "./f4", "./log"]  # all files seem to be on one device
    close_all(stacking)


DEEPEN = """
echo {0} > f{0}; rm -f f$(({0} - 3)); mkdir -p d{0}/deep; echo {0} > d{0}/deep/file; ln -s f{0} link{0}; ln f{0} hard{0}
[ {0} -lt 2 ] || {{ mv d$(({0} - 1)) moved{0}; rm -r moved$(({0} - 1)) 2>/dev/null; echo more >> moved{0}/deep/file; }}
rm -rf same; mkdir same; touch same/{0}; truncate -s 1M sparse; echo {0} >> log; chmod 70{1} .
[ "$UID" != 0 ] || {{ echo {0} > /etc/x{0}; rm -rf /etc/x$(({0} - 2)) /srv/same; mkdir -p /srv/same; touch /srv/same/{0}; }}
"""
SURVEY = """
for place in /workspace /etc /srv; do
    find $place -type f -exec md5sum {} + 2>/dev/null | sort; find $place -printf '%P %y %m %U %s %l\\n' 2>/dev/null | sort
done
"""


def test_many_layers_are_merged_in_the_background_without_visible_changes(stacking: Daemon) -> None:
    def depths() -> list[int]:
        records = [json.loads(path.read_text()) for path in (stacking.state / "sessions").glob("*.json")]
        return sorted(len(record["layers"]) for record in records)

    with stacking.client() as client:
        name = client.open("acme", "parent")
        for number in range(1, MERGED_LAYERS + 1):
            run_script(client, name, DEEPEN.format(number, number % 8))
            before = run_script(client, name, SURVEY) if number >= MERGED_LAYERS - 1 else ""
            client.fork(name, [f"acme:c{number}"])
            if number == MERGED_LAYERS - 1:
                earlier = before
        wait_until(lambda: depths()[-1] < MERGED_LAYERS, SOON_S, lambda: f"merged: {depths()} {stacking.log()}")
        for session, expected in (
            (name, before),
            (f"acme:c{MERGED_LAYERS}", before),
            (f"acme:c{MERGED_LAYERS - 1}", earlier),
        ):
            assert run_script(client, session, SURVEY) == expected
        client.fork(name, ["acme:last"])
        assert run_script(client, "acme:last", SURVEY) == before
        assert run_script(
            client, "acme:last", "mv moved16 other; cat other/deep/file; [ f15 -ef hard15 ] && echo one"
        ).split() == ["15", "more", "one"]
    close_all(stacking)


def test_a_fork_of_a_root_session_has_the_changes_of_the_whole_file_system(daemons: Daemons) -> None:
    daemon = daemons.start(**SETTINGS["oci-root"])
    with daemon.client() as client:
        name = client.open("acme", "parent")
        run_script(client, name, "useradd -m -u 4321 eve && rm /etc/issue && echo new > /etc/motd && mkdir /srv/deep")
        client.fork(name, ["acme:child"])
        look = "id -u eve; cat /etc/motd; ls -d /etc/issue /srv/deep /home/eve 2>/dev/null"
        for session in ("acme:child", name):
            shown = run_script(client, session, look).splitlines()
            assert shown == ["4321", "new", "/home/eve", "/srv/deep"]
        run_script(client, "acme:child", "userdel -r eve; echo child > /etc/motd")
        assert run_script(client, name, "cat /etc/motd; id -u eve").split() == ["new", "4321"]
        client.fork("acme:child", ["acme:grandchild"])
        assert run_script(client, "acme:grandchild", "cat /etc/motd; ls -d /home/*").split() == [
            "child",
            "/home/sandbox",
        ]
    close_all(daemon)


def test_forking_a_session_with_a_running_job_is_refused_unless_jobs_are_left(daemon: Daemon) -> None:
    with daemon.client() as client:
        name = client.open("acme", "parent")
        run_script(client, name, f"[ $UID != 0 ] || echo root > /etc/own; {FILL}")
        request = {
            "op": "job_start",
            "script_bytes": 8,
            "label": "wait",
            "wait_ms": 0,
            "max_bytes": 10,
            "timeout_s": 9.0,
        }
        job = client.call(name, request, b"sleep 60").done["job"]
        with pytest.raises(ToolFailure) as refused:
            client.fork(name, ["acme:child"])
        assert refused.value.code == ErrorCode.SESSION_BUSY
        assert [row["name"] for row in client.sessions()] == [name]

        client.fork(name, ["acme:child"], leave_jobs=True)

        run_script(client, name, "echo later > file; echo later > /etc/own")
        assert run_script(client, "acme:child", f"{LOOK}; pgrep sleep").split() == SEEN
        assert run_script(client, "acme:child", "[ $UID != 0 ] || cat /etc/own").split() in ([], ["root"])
        jobs = client.call(name, {"op": "job_list", "timeout_s": 5.0}).done["jobs"]
        assert [(row["job"], row["state"]) for row in jobs] == [(job["job"], "running")]
    close_all(daemon)


def test_an_impossible_fork_is_refused_and_changes_nothing(daemons: Daemons) -> None:
    daemon = daemons.start(**SETTINGS["oci"], max_sessions="3")
    with daemon.client() as client:
        name = client.open("acme", "parent")
        run_script(client, name, "echo base > file")
        for children, code in (
            ([f"acme:c{number}" for number in range(3)], ErrorCode.SANDBOX_UNAVAILABLE),
            (["acme:parent"], ErrorCode.INVALID_ARGUMENTS),
            (["rival:child"], ErrorCode.INVALID_ARGUMENTS),
            (["acme:a", "acme:a"], ErrorCode.INVALID_ARGUMENTS),
            ([], ErrorCode.INVALID_ARGUMENTS),
        ):
            with pytest.raises((ToolFailure, SandboxUnavailable)) as refused:
                client.fork(name, children)
            assert refused.value.code == code
        answer = bash(client, name, "cat file")
        assert (answer.streams["merged"], answer.done["sandbox"]["generation"]) == (b"base\n", 1)
        assert [row["name"] for row in client.sessions()] == [name]
    close_all(daemon)


def test_forks_keep_files_and_shell_after_a_stop_of_sandboxd_and_files_after_a_kill(stacking: Daemon) -> None:
    with stacking.client() as client:
        name = client.open("acme", "parent")
        run_script(client, name, FILL)
        client.fork(name, ["acme:a", "acme:b"])
        client.fork("acme:a", ["acme:c"])
    assert stacking.stop() == 0
    stacking.start()
    with stacking.client() as client:
        answer = bash(client, "acme:c", LOOK)
        assert (answer.streams["merged"].decode().split(), answer.done["sandbox"]["rebuilt"]) == (SEEN, False)
        run_script(client, "acme:c", "echo more >> file")
        client.fork("acme:c", ["acme:d"])
    stacking.kill()
    stacking.start()
    with stacking.client() as client:
        assert run_script(client, "acme:d", "cd /workspace/sub; cat file").split() == ["base", "more"]
        assert run_script(client, "acme:b", LOOK).split() == SEEN
    close_all(stacking)


def test_a_growing_tree_of_forks_survives_kills_of_sandboxd(stacking: Daemon) -> None:
    """Every session has the files of its line, and only those; and nothing is left at the end."""
    tree = Tree(stacking, random.Random(1))
    tree.plant()
    for round_ in range(5):
        tree.grow_until_killed(0.2 + 0.15 * round_, 3)
    tree.grow_to(5, 3)
    assert tree.find_wrong() == []
    close_all(stacking)


async def test_batch_items_start_with_a_fork_of_a_session(client: ToolClient, session: Session, tmp_path: Path) -> None:
    await session.call("bash_tool", {"command": "echo base > file; cd /tmp"})
    arguments = {"command": "pwd; cat /workspace/file; echo more >> /workspace/file"}
    lines = [{"id": f"i{number}", "tool": "bash_tool", "arguments": arguments, "fork": session.id} for number in (1, 2)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file, runs, batch = load_lines(tmp_path / "in.jsonl"), client.batch_runs(), f"forks-{secrets.token_hex(4)}"

    with runs.open_rows(RowPaths(tmp_path / "out.jsonl"), batch, file) as rows:
        await runs.batches.submit(file, batch=batch, concurrency=2)
        await runs.work(batch, lambda watched: JsonLines(watched, io.StringIO()), rows=rows)

    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(found) == 2
    assert all("/tmp\\nbase" in json.dumps(row) and "more" not in json.dumps(row["response"]) for row in found), found
    assert (await session.call("bash_tool", {"command": "cat /workspace/file"})).metadata["stdout"] == "base\n"


async def test_forks_are_listed_attached_forked_and_closed_like_other_sessions(
    client: ToolClient, session: Session
) -> None:
    await session.call("bash_tool", {"command": "echo base > file; export COLOUR=blue"})

    forks = await session.fork(2)

    try:
        assert {fork.id for fork in forks} < {row.id for row in (await client.sessions()).sessions}
        attached = await client.session(forks[0].id)
        result = await attached.call("bash_tool", {"command": 'cat file; echo "$COLOUR"; echo more >> file'})
        assert result.metadata["stdout"] == "base\nblue\n"
        (grandchild,) = await attached.fork()
        async with grandchild:
            result = await grandchild.call("bash_tool", {"command": "cat file"})
            assert result.metadata["stdout"] == "base\nmore\n"
        assert (await session.call("bash_tool", {"command": "cat file"})).metadata["stdout"] == "base\n"
        with pytest.raises(ToolFailure) as refused:
            await session.fork(101)
        assert refused.value.code == ErrorCode.INVALID_ARGUMENTS
    finally:
        for fork in forks:
            await fork.close()
    with pytest.raises(ToolFailure) as failure:
        await client.session(forks[0].id)
    assert failure.value.code == ErrorCode.SESSION_NOT_FOUND
