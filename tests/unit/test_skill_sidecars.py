"""skill.tool.json: the file that makes a skill a separate tool, and the error messages for a wrong file."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.skill_sidecars import MAX_SIDECAR_BYTES, SidecarBroken, build_argv, build_skill_spec, parse_sidecar
from contract.specs import SkillSummary

FILES = ("SKILL.md", "scripts/run.py")
LEAST = {"entrypoint": "scripts/run.py"}


def parse(**fields: Any) -> Any:
    return parse_sidecar(json.dumps({**LEAST, **fields}).encode(), FILES)


def summary(name: str = "word-count", description: str = "Counts words.") -> SkillSummary:
    return SkillSummary(name=name, description=description, digest="0" * 64, files=2, bytes=1)


def test_all_that_it_says_is_in_the_spec() -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    sidecar = parse(
        parameters=parameters,
        timeout=30,
        requires_permission=True,
        dangerous=True,
        network=True,
        args="argv",
        interpreter="python3",
    )
    spec = build_skill_spec(summary(), sidecar)
    assert (spec.parameters, spec.timeout_s, spec.requires_permission, spec.dangerous) == (parameters, 30, True, True)
    assert spec.description.endswith("it needs network.")
    assert "with all of it; it needs network" in spec.with_network("with all of it").description


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"entrypoint": "scripts/none.py"}, "no file 'scripts/none.py'"),
        ({"entrypoint": "../run.py"}, "no file"),
        ({"entrypoint": ""}, "entrypoint"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": 1e9}, "timeout"),
        ({"timeout": "30"}, "timeout"),
        ({"network": 1}, "network"),
        ({"args": "env"}, "args"),
        ({"interpreter": "python3 -c evil"}, "interpreter"),
        ({"parameters": {"type": "array"}}, "object"),
        ({"parameters": {"type": "object", "properties": {"a": {"type": "no-type"}}}}, "parameters"),
        ({"parameters": {"type": "object", "properties": {"a": {"$ref": "https://example.org/x"}}}}, "not within it"),
        ({"parameters": "x"}, "parameters"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_an_invalid_tool_is_reported(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SidecarBroken, match=message):
        parse(**fields)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b"\xff", b"null", b"{}", b"[" * 10_000, b" " * (MAX_SIDECAR_BYTES + 1)]
)
def test_an_invalid_sidecar_is_reported(text: bytes) -> None:
    with pytest.raises(SidecarBroken):
        parse_sidecar(text, FILES)


def test_a_deeply_nested_schema_is_reported() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(150):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(SidecarBroken, match="recursion"):
        parse(parameters=schema)


@pytest.mark.parametrize("name", ["a.b", "x" * 65, "a b"])
def test_an_invalid_tool_name_is_reported(name: str) -> None:
    with pytest.raises((SidecarBroken, ValueError)):
        build_skill_spec(summary(name), parse())


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_invalid_json_numbers_are_reported(number: str) -> None:
    text = (
        b'{"entrypoint": "scripts/run.py", "parameters": {"type": "object", "properties": {"a": {"default": '
        + number.encode()
        + b"}}}}"
    )
    with pytest.raises(SidecarBroken):
        build_skill_spec(summary(), parse_sidecar(text, FILES))


def test_arguments_as_words() -> None:
    parameters = {"path": "-rf", "deep": True, "quiet": False, "none": None, "n": [1, "b"], "at": {"x": "ü"}, "f": 1.5}
    assert build_argv(parameters) == ["--path=-rf", "--deep", "--n=1", "--n=b", '--at={"x": "ü"}', "--f=1.5"]


@given(st.binary(max_size=400))
def test_any_bytes_make_a_sidecar_or_a_sentence(text: bytes) -> None:
    with contextlib.suppress(SidecarBroken):
        parse_sidecar(text, FILES)
