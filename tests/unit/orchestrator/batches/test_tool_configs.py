"""The configuration of tools that a caller gives with a session: its limits, and the same rules at every door."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import ValidationError

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.contract.tool_configs import MAX_BYTES, parse_tool_config
from toolcrew.orchestrator.api.runs import NewRun
from toolcrew.orchestrator.api.sessions import NewSession
from toolcrew.orchestrator.batches.line_shapes import RunFields
from toolcrew.orchestrator.cli.session_options import read_config

INVALID: list[Any] = [
    {"t": {"text": "x" * MAX_BYTES}},
    {"t": {"text": "é" * (MAX_BYTES // 2)}},
    {"t": 1},
    {"t": ["x"]},
    {"": {}},
    {"t" * 129: {}},
    ["t"],
    "t",
    {"t": {"n": math.nan}},
    {"t": {"n": "\ud800"}},
    {"t": {"n": json.loads("[" * 30 + "]" * 30)}},
    {f"t{number}": {} for number in range(1000)},
]


@pytest.mark.parametrize("value", INVALID, ids=range(len(INVALID)))
def test_no_door_accepts_an_invalid_configuration(value: Any) -> None:
    with pytest.raises(ConfigError):
        parse_tool_config(value)
    with pytest.raises(ValidationError):
        NewSession(tool_config=value)
    with pytest.raises(ValidationError):
        NewRun(instruction="x", tool_config=value)
    with pytest.raises(ValidationError):
        RunFields(instruction="x", tool_config=value)
    with contextlib.suppress(ValueError), pytest.raises(typer.BadParameter):
        read_config(json.dumps(value))


def test_every_door_passes_the_configuration_on(tmp_path: Path) -> None:
    config = {"bash_tool": {"a": [1, None, {"b": "é"}]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert NewSession(tool_config=config).tool_config == config
    assert NewRun(instruction="x", tool_config=config).environment().tool_config == config
    assert RunFields(instruction="x", tool_config=config).to_environment().tool_config == config
    assert read_config(json.dumps(config)) == read_config(f"@{tmp_path}/config.json") == config
    assert SessionSpec(tool_config=config).tool_config == config


def test_an_unreadable_file_is_a_wrong_option() -> None:
    for text in ("@/nowhere.json", "{", "[" * 100_000):
        with pytest.raises(typer.BadParameter):
            read_config(text)
