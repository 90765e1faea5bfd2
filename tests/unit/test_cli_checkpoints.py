"""`toolcrew run --checkpoint`: refused before anything starts where the checkpoint would not be there afterwards."""

import pytest
from typer.testing import CliRunner

from orchestrator.cli import app


@pytest.mark.parametrize("name", ["TOOLCREW_REDIS_URL", "TOOLCREW_WORKSPACE_STORE"])
def test_a_checkpoint_that_would_go_with_the_stack_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TOOLCREW_REDIS_URL", "TOOLCREW_WORKSPACE_STORE"):
        monkeypatch.delenv(variable, raising=False)
    done = CliRunner().invoke(app, ["run", "hello", "--model", "scripted", "--checkpoint"])
    assert (done.exit_code, name in done.stderr) == (1, True)


def test_a_network_that_there_is_not_is_a_mistake_of_usage() -> None:
    done = CliRunner().invoke(app, ["call", "bash_tool", "command=true", "--network", "host"])
    assert (done.exit_code, "egress" in done.stderr) == (2, True)
