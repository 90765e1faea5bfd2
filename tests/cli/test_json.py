"""JSON output of commands: every list has one shape with a cursor, and every time is ISO 8601."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.conftest import RedisProcess
from tests.support.records.builders import build_spec
from toolcrew.contract.specs import Catalog
from toolcrew.orchestrator.command import app, import_all

ITEMS = {
    "approvals": "approvals",
    "batches": "batches",
    "calls": "calls",
    "changes": "changes",
    "hosts": "hosts",
    "keys": "keys",
    "models": "models",
    "runs": "runs",
    "secrets": "secrets",
    "sessions": "sessions",
    "skills": "skills",
    "tenants": "tenants",
    "tools": "tools",
}
"""Group of commands -> name of the items that its `list` prints."""


@pytest.fixture
def redis_url(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    redis_server.publish_catalog(Catalog(tools=(build_spec("bash_tool"),)))
    return redis_server.url


def run(*arguments: str) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_every_list_of_the_commands_is_tested() -> None:
    groups = {name for name, group in import_all().commands.items() if "list" in getattr(group, "commands", {})}
    assert groups == ITEMS.keys()


@pytest.mark.parametrize(("group", "items"), ITEMS.items())
def test_every_list_has_the_same_shape(redis_url: str, group: str, items: str) -> None:
    printed = run(*group.split(), "list")
    assert printed.keys() == {items, "next_cursor"}
    assert isinstance(printed[items], list)
    assert printed["next_cursor"] is None


def walk(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    yield name, value
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from walk(child, str(key))


def assert_instants(printed: Any) -> int:
    """Fail for a time that is a number. Return how many times were found."""
    times = [value for name, value in walk(printed) if name in ("at", "since") or name.endswith("_at")]
    assert not [value for value in times if isinstance(value, int | float)], printed
    return len([value for value in times if value is not None])


def test_every_time_that_a_command_prints_is_iso_8601(redis_url: str, tmp_path: Any) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"id": "a", "instruction": "x"}\n')
    run("tenants", "add", "acme")
    key = run("keys", "create", "acme")
    (tmp_path / "secret").write_text("value-1234567890")
    run("secrets", "set", "TOKEN", "--tenant", "acme", "--from", str(tmp_path / "secret"))
    CliRunner().invoke(app, ["batches", "submit", str(lines), "--detach", "--id", "b"])
    assert assert_instants(key) >= 1
    for command in ("keys list", "secrets list --tenant acme", "changes list", "batches list", "batches show b"):
        assert assert_instants(run(*command.split())) >= 1, command
