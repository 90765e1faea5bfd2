"""`toolcrew call --timeout` refuses a limit that no call can have, before it connects to anything."""

import pytest
from typer.testing import CliRunner

from orchestrator.command import app


@pytest.mark.parametrize(
    "command",
    [["call", "bash_tool", "command=true", "--timeout"], ["sessions", "exec", "--timeout"]],
    ids=["call", "session exec"],
)
@pytest.mark.parametrize(
    ("timeout", "message"),
    [
        ("99999", "less than or equal to 86400"),
        ("86400.5", "less than or equal to 86400"),
        ("0", "greater than or equal to 0.001"),
        ("-1", "greater than or equal to 0.001"),
    ],
)
def test_a_limit_out_of_range_is_refused(
    command: list[str], timeout: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", "redis://127.0.0.1:1/0")
    rest = ["s1", "--", "true"] if command[0] == "session" else []

    result = CliRunner().invoke(app, [*command, timeout, *rest], env={"COLUMNS": "200"})

    assert result.exit_code == 2
    assert "--timeout" in result.stderr
    assert message in result.stderr
