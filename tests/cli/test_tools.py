"""`toolcrew tools`: listing, showing, and switching off and on, for people and for programs."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.conftest import RedisProcess
from tests.support.records.builders import build_spec
from toolcrew.contract.names import catalog_names_key, switches_key
from toolcrew.contract.specs import Catalog
from toolcrew.orchestrator.command import app

ECHO = build_spec(
    "echo_tool",
    properties={
        "text": {"type": "string", "description": "what to\n say"},
        "times": {"type": ["integer", "null"], "default": 1},
        "how": {"enum": ["loud", "low"]},
    },
    required=["text"],
    aliases={"words": "text"},
    read_only=True,
    max_timeout_s=60,
)
HOSTILE = build_spec("hostile_tool").model_copy(update={"description": "Nice. \x1b[2J\x07"})

Toolcrew = Callable[..., Result]


@pytest.fixture
def toolcrew(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> Toolcrew:
    """Run the command on a pool that publishes two tools and a verb."""
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    catalog = Catalog(tools=(ECHO, HOSTILE, build_spec("session.open", audience="session")))
    redis_server.publish_catalog(catalog)
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, ["tools", *arguments])


def as_json(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_show_prints_the_schema_and_the_switch_of_a_disabled_tool(toolcrew: Toolcrew) -> None:
    toolcrew("disable", "echo_tool", "--reason", "it is being repaired")
    reply = as_json(toolcrew("show", "echo_tool", "--json"))
    assert (reply["name"], reply["state"], reply["parameters"]) == ("echo_tool", "disabled", ECHO.parameters)
    assert (reply["switch"]["by"], reply["switch"]["reason"]) == ("default", "it is being repaired")
    assert re.fullmatch(r"20[0-9-]+T[0-9:]+Z", reply["switch"]["at"])
    head = toolcrew("show", "echo_tool").stdout.splitlines()[0]
    assert re.fullmatch(r"echo_tool is disabled: .* by default at 20\S+Z \(it is being repaired\)", head)


def test_a_tool_without_workers_can_be_disabled(toolcrew: Toolcrew, redis_server: RedisProcess) -> None:
    with redis_server.client() as client:
        client.set(catalog_names_key("default", "web"), json.dumps(["webfetch_tool"]))
        assert "no worker serves webfetch_tool now: start one" in toolcrew("show", "webfetch_tool").stderr
        assert (
            toolcrew("disable", "webfetch_tool").stdout
            == "webfetch_tool is disabled, but no running worker serves it\n"
        )
        assert list(client.hgetall(switches_key("default"))) == [b"webfetch_tool"]
    assert as_json(toolcrew("enable", "webfetch_tool", "--json")) == {"name": "webfetch_tool", "state": "enabled"}


@pytest.mark.parametrize("verb", ["show", "disable", "enable"])
def test_an_unknown_tool_is_reported_with_the_nearest_name(toolcrew: Toolcrew, verb: str) -> None:
    result = toolcrew(verb, "ecko_tool")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "Tool not found: ecko_tool; similar names: echo_tool" in result.stderr
    assert "Traceback" not in result.stderr


def test_control_characters_in_tool_descriptions_are_escaped(toolcrew: Toolcrew) -> None:
    output = toolcrew("list").stdout + toolcrew("show", "hostile_tool").stdout
    assert not set(output) & {"\x1b", "\x07"}
