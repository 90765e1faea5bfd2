"""docs/tenants.md and docs/tools.md: commands work as written, and tables match policies and specs."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conftest import RedisProcess
from toolcrew.contract.specs import ToolSpec
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.contract.tool_pages import render_tool
from toolcrew.orchestrator.cli.policy_options import OPTIONS
from toolcrew.orchestrator.command import app

PAGE = (Path(__file__).parent.parent.parent / "docs" / "tenants.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


def test_documented_tenant_commands_work(
    redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    monkeypatch.chdir(tmp_path)
    [policy] = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "policy.json").write_text(policy)
    (tmp_path / "token.txt").write_text("a-secret-value\n")
    runner, key_id = CliRunner(), "KEY_ID"
    for command in COMMANDS:
        done = runner.invoke(app, shlex.split(command.replace("KEY_ID", key_id))[1:])
        assert done.exit_code == 0, f"{command}: {done.output}"
        created_key = re.match(r"tc_([0-9a-f]{16})_", done.stdout)
        key_id = created_key[1] if created_key is not None else key_id
    assert len(COMMANDS) > 8


def test_option_table_matches_fields_and_defaults() -> None:
    rows = {row[0]: row[1:] for row in re.findall(r"^\| `--([\w-]+)` \| `([\w.]+)` \| ([^|]+) \|", PAGE, re.MULTILINE)}
    assert {option: field for option, (field, _) in rows.items()} == {
        option: ".".join(path) for option, path in OPTIONS.items()
    }
    defaults = TenantPolicy().model_dump(mode="json")
    for option, (_, meaning) in rows.items():
        value = defaults
        for name in OPTIONS[option]:
            value = value[name]
        defaults_in_words = {
            "tools": "all",
            "models": "all",
            "rate": "no limit",
            "secret": "all",
            "command-rule": "none",
            "trust-skill": "none",
            "class": "`default`",
            "streams": "by the rules",
        }.get(option, "no limit" if OPTIONS[option][0] == "budgets" else "as the class says")
        expected = f"{value:,.0f}" if isinstance(value, int | float) else defaults_in_words
        assert meaning.strip() == expected, option


def test_documented_policy_file_is_valid() -> None:
    [policy] = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert TenantPolicy.model_validate(json.loads(policy)).weight == 2


def test_tools_page_shows_a_tool_without_parameters() -> None:
    page = render_tool(ToolSpec(name="now", description="The time.", parameters={"type": "object"}))
    assert "No parameters." in page
    assert "- Flags: none." in page
