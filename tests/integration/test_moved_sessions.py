"""Two sandboxds of one deployment with one store. A session whose host dies continues on the other host from its last
checkpoint.
"""

import pytest

from tests.support.stack.daemons import Daemons, bash, run_script
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.session_spec import SessionSpec

pytestmark = pytest.mark.stack

AT = "2030-01-31T12:00:00+00:00"


def test_a_session_of_a_killed_sandboxd_continues_elsewhere_and_reports_what_was_lost(daemons: Daemons) -> None:
    store = str(daemons.folder / "store")
    one, two = (
        daemons.start(name, workspace_store=store, sandbox_workspace="tmpfs", pool_size="0") for name in ("one", "two")
    )
    with one.client() as client:
        name = client.open("acme", "s1")
        bash(client, name, "echo kept > file; cd /tmp; export COLOUR=blue")
        checkpoint = client.checkpoint(name, automatic=True)["checkpoint"]
        [row] = client.sessions()
        assert (row["changed"], row["checkpoint"], client.status()["store"]) == (False, checkpoint, "shared")
        bash(client, name, "echo later >> /workspace/file")
        assert client.sessions()[0]["changed"] is True
    one.kill()

    with two.client() as client:
        with pytest.raises(ToolFailure, match="no such checkpoint") as refused:
            client.open("umbrella", "s1", SessionSpec(restore=checkpoint), moved={"generation": 2})
        assert refused.value.code is ErrorCode.FILE_NOT_FOUND
        moved = {"generation": 2, "checkpoint_at": AT}
        name = client.open("acme", "s1", SessionSpec(restore=checkpoint), moved=moved)
        answer = bash(client, name, 'cat /workspace/file; echo "$COLOUR"')
        assert answer.streams["merged"] == b"kept\nblue\n"
        sandbox = answer.done["sandbox"]
        assert (sandbox["generation"], sandbox["rebuilt"], AT in sandbox["news"]) == (2, True, True)
        assert client.sessions()[0]["changed"] is True
        following = client.checkpoint(name, automatic=True)["checkpoint"]
        assert client.delete_checkpoint(name, checkpoint)["deleted"]
        assert client.close(name)
        again = client.open("acme", "s2", SessionSpec(restore=following))
        assert run_script(client, again, "cat /workspace/file") == "kept\n"
        assert client.status()["sandboxes"] == 1


def test_the_status_of_a_host_contains_what_placement_needs(daemons: Daemons) -> None:
    classes = '{"apart": {"pids": 64, "images": ["other:1"], "largest": {"pids": 128}}}'
    daemon = daemons.start(tenant_classes=classes, max_sandboxes="7", max_sessions="9", pool_size="0")
    status = daemon.status()
    figures = {
        name: status[name]
        for name in ("classes", "largest", "max_sandboxes", "max_sessions", "sandboxes", "sessions", "store")
    }
    assert figures == {
        "classes": ["apart", "default"],
        "largest": status["largest"],
        "max_sandboxes": 7,
        "max_sessions": 9,
        "sandboxes": 0,
        "sessions": 0,
        "store": "local",
    }
    assert {name: options["pids"] for name, options in status["largest"].items()} == {"apart": 128, "default": 256}
    assert all(None not in options.values() for options in status["largest"].values())
    assert "other:1" in status["images"]
    assert min(status["memory_free_bytes"], status["disk_free_bytes"]) > 0
