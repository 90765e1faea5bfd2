"""Sentences for invalid input: our own words for every kind of error of pydantic, at every door, and the nearest name."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import pytest
import typer
from mcp.types import CallToolRequestParams
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticKnownError
from pydantic_core._pydantic_core import list_all_errors

from tests.support.records import builders
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import ToolcrewError, ToolFailure
from toolcrew.contract.functions.function_schemas import read_function
from toolcrew.contract.invalid_input import describe_invalid, explain_error, explain_errors, find_invalid
from toolcrew.contract.settings import OrchestratorSettings, read_environment
from toolcrew.contract.skill_sidecars import parse_sidecar
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.adapters.inspect_config import parse_config
from toolcrew.orchestrator.approvals.gate import _replace_arguments
from toolcrew.orchestrator.batches.lines import read_lines
from toolcrew.orchestrator.batches.rows import parse_row
from toolcrew.orchestrator.cli.batches_options import parse_webhook
from toolcrew.orchestrator.cli.models import _build as build_endpoint
from toolcrew.orchestrator.cli.policy_options import apply_options, read_policy
from toolcrew.orchestrator.cli.session_options import parse_options
from toolcrew.orchestrator.mcp.calls import _parse_call as parse_mcp_call
from toolcrew.orchestrator.sessions.session import build_call
from toolcrew.store.secrets import _build_info as build_secret
from toolcrew.workers.mcp.settings import HttpEntry, load_servers
from toolcrew.workers.sandboxd.request_fields import parse_spec

PYDANTIC = ("Input should", "Value error", "Extra inputs", "Field required", "valid string", "Assertion failed")


class Limits(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_cost: float | None = Field(default=None, gt=0)


class Run(BaseModel):
    model_config = ConfigDict(extra="forbid")

    instruction: str = Field(default="x", min_length=1, max_length=5)
    tools: list[str] | None = Field(default=None, max_length=1)
    dialect: Literal["native", "tags"] = "native"
    steps: int = Field(default=1, ge=1)
    name: str = Field(default="a", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    limits: Limits = Limits()
    parts: list[Annotated[Limits, Field()]] = []
    stop: str | list[str] = ""
    secret: str = ""

    @field_validator("secret")
    @classmethod
    def _check(cls, value: str) -> str:
        if value:
            raise ValueError("a secret is not accepted here: use PUT /v1/secrets/NAME")
        return value


def explain(fields: Any) -> str:
    with pytest.raises(ValidationError) as refused:
        Run.model_validate(fields)
    return describe_invalid(refused.value, Run)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tolls": []}, "`tolls` is an unknown field: did you mean `tools`?"),
        ({"maxCost": 1}, "`maxCost` is an unknown field: the fields are dialect, instruction, limits, name, parts,"),
        ({"max_cost": 1}, "`max_cost` is an unknown field: write it as `limits.max_cost`"),
        ({"prompt": "x"}, "`prompt` is an unknown field: did you mean `instruction`?"),
        ({"limits": {"maxCost": 1}}, "`limits.maxCost` is an unknown field: did you mean `max_cost`?"),
        ({"parts": [{"cost": 1}]}, "`parts.0.cost` is an unknown field: did you mean `max_cost`?"),
        ({"limits": {"max_cost": 0}}, "`limits.max_cost` must be greater than 0"),
        ({"limits": []}, "`limits` must be an object"),
        ({"steps": "many"}, "`steps` must be a whole number"),
        ({"steps": 1.5}, "`steps` must be a whole number"),
        ({"steps": 0}, "`steps` must be at least 1"),
        ({"instruction": 7}, "`instruction` must be a string"),
        ({"instruction": ""}, "`instruction` must not be empty"),
        ({"instruction": "123456"}, "`instruction` must have at most 5 characters"),
        ({"instruction": None}, "`instruction` must be a string"),
        ({"tools": "a"}, "`tools` must be a list"),
        ({"tools": ["a", "b"]}, "`tools` must have at most 1 item"),
        ({"tools": [1]}, "`tools.0` must be a string"),
        ({"dialect": "nativ"}, "`dialect` must be 'native' or 'tags'"),
        ({"name": "a b"}, "`name` must have 1 to 64 letters, digits, '-' and '_'"),
        ({"stop": 5}, "`stop` must be a string or a list"),
        ({"secret": "x"}, "`secret`: a secret is not accepted here: use PUT /v1/secrets/NAME"),
        ([], "the value must be an object"),
    ],
)
def test_an_invalid_field_is_described_with_what_to_write(fields: Any, sentence: str) -> None:
    assert explain(fields).startswith(sentence)


def test_the_nearest_names_and_values_are_listed() -> None:
    with pytest.raises(ValidationError) as refused:
        Run.model_validate({"tolls": [], "dialect": "tag"})
    nearest = {part.path: part.nearest[0] for part in explain_errors(refused.value.errors(), Run)}
    assert nearest == {("tolls",): "tools", ("dialect",): "tags"}


def test_no_sentence_of_pydantic_is_shown_for_any_of_its_errors() -> None:
    for known in list_all_errors():
        context: dict[str, Any] = dict(known["example_context"] or {})
        message = PydanticKnownError(known["type"], context or None).message()
        details = {"type": known["type"], "loc": ("a", "b"), "msg": message, "input": "x", "ctx": context}
        sentence = str(explain_error(details, Run))
        assert sentence.startswith(("`a.b`", "`a`")), known
        assert not any(text in sentence for text in PYDANTIC), (known["type"], sentence)


def test_a_sentence_is_short_and_encodable_for_any_name() -> None:
    with pytest.raises(ValidationError) as refused:
        Run.model_validate({"\ud800" + "x" * 100_000: 1})
    sentence = str(find_invalid(refused.value, Run))
    assert len(sentence.encode()) < 300


def test_the_error_of_text_that_is_not_json_has_a_position() -> None:
    with pytest.raises(ValidationError) as refused:
        Run.model_validate_json('{"steps": 1,}')
    assert describe_invalid(refused.value) == "the value is not valid JSON (line 1, column 13)"


# Doors: places where input from a user, a model, a tenant or a file becomes a record


def bind(value: Any) -> Any:
    def tool(count: int, kind: Literal["a", "b"] = "a") -> str:
        return f"{count}{kind}"

    return read_function(tool).bind(value, cast(Any, None))


def raise_result(result: Any) -> Any:
    if isinstance(result, ToolResult) and result.error_code is not None:
        raise ToolFailure(result.error_code, result.error or "")
    return result


def parse_receiver(folder: Path) -> Any:
    path = folder / "secret"
    path.write_text("no")
    return parse_webhook("http://a.example/", path, is_detached=True)


def read_settings(name: str, value: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        return read_environment(OrchestratorSettings)


def read_policy_file(folder: Path, text: str) -> Any:
    path = folder / "policy.json"
    path.write_text(text)
    return read_policy(path)


def read_servers(folder: Path, entry: str) -> Any:
    path = folder / "mcp.json"
    path.write_text(f'{{"mcpServers": {{"a": {entry}}}}}')
    return load_servers(path, HttpEntry, {})


DOORS: dict[str, Callable[[Path], Any]] = {
    "option --sandbox": lambda _: parse_options("cpus=many"),
    "option --sandbox with a size": lambda _: parse_options("memory=lots"),
    "option of a tenant": lambda _: apply_options(TenantPolicy(), {"weight": -1.0}),
    "command rule of a tenant": lambda _: apply_options(TenantPolicy(), {"command-rule": ["perhaps:bash_tool"]}),
    "option of a model endpoint": lambda _: build_endpoint({"base_url": "x", "model": ""}, None),
    "policy file": lambda folder: read_policy_file(folder, '{"sandbox": {"netwrok": "none"}}'),
    "policy file that is not JSON": lambda folder: read_policy_file(folder, "{"),
    "webhook of a command": parse_receiver,
    "setting": lambda _: read_settings("TOOLCREW_QUEUE_WAIT_S", "-1"),
    "setting with a pattern": lambda _: read_settings("TOOLCREW_PAGE_URL", "nowhere"),
    "secret": lambda _: build_secret({"name": "small", "hosts": ["a.example"], "place": "basic"}),
    "argument of a function": lambda _: bind({"count": "many"}),
    "choice of a function": lambda _: bind({"count": 1, "kind": "c"}),
    "call of the SDK": lambda _: raise_result(build_call("t", {"x": float("nan")})),
    "call id of the SDK": lambda _: raise_result(build_call("t", {}, "a b")),
    "call of an MCP client": lambda _: parse_mcp_call("c", CallToolRequestParams(name="t" * 200, arguments={})),
    "changed call of an approver": lambda _: _replace_arguments(
        builders.build_call(), builders.build_spec(properties={"text": {}}), {"text": float("nan")}, ()
    ),
    "line of a batch": lambda _: read_lines(BytesIO(b'{"id": 1, "instruktion": "x", "samples": 0}'), None, "the body"),
    "row of a batch": lambda _: parse_row(b'{"custom_id": 1}'),
    "sidecar of a skill": lambda _: parse_sidecar(b'{"entrypoint": 1}', ()),
    "options for sandboxd": lambda _: parse_spec({"cpu": 1}),
    "MCP servers of a file": lambda folder: read_servers(folder, '{"url": "http://a.example", "timeuot": 1}'),
    "sandbox of Inspect": lambda _: parse_config({"cpu": 1}),
}


@pytest.mark.parametrize("door", DOORS)
def test_no_door_shows_a_sentence_of_pydantic(door: str, tmp_path: Path) -> None:
    with pytest.raises((ToolcrewError, typer.BadParameter, ValueError)) as refused:
        DOORS[door](tmp_path)
    message = str(getattr(refused.value, "message", refused.value))
    assert not isinstance(refused.value, ValidationError)
    assert not any(text in message for text in PYDANTIC), message
    assert "pydantic" not in message
