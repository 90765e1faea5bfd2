"""Arguments against a schema: aliases, coercion of text, defaults, checks, and the error message for a model."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, SchemaError

from contract.errors import ErrorCode, ToolFailure
from contract.schema import check_schema, prepare_arguments
from tests.builders import build_spec

LIMITS = {"limit": {"type": "integer", "minimum": 1, "default": 10}, "query": {"type": "string"}}


def prepare(
    properties: dict[str, Any], arguments: dict[str, Any], *, required: list[str] | None = None, **how: Any
) -> dict[str, Any]:
    return prepare_arguments(build_spec(properties=properties, required=required), arguments, **how)[0]


def complaint(properties: dict[str, Any], arguments: dict[str, Any], **how: Any) -> str:
    """Return the error message for refused arguments. Any exception except ToolFailure fails the test."""
    with pytest.raises(ToolFailure) as refused:
        prepare(properties, arguments, **how)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
    return refused.value.message


# Defaults


def test_a_missing_parameter_gets_its_default_and_a_given_one_keeps_its_value() -> None:
    assert prepare(LIMITS, {}) == {"limit": 10}
    assert prepare(LIMITS, {"limit": 3}) == {"limit": 3}


def test_a_default_satisfies_required() -> None:
    assert prepare(LIMITS, {}, required=["limit"]) == {"limit": 10}


def test_a_default_of_null_or_false_is_a_default() -> None:
    properties = {"a": {"default": None}, "b": {"type": "boolean", "default": False}}
    assert prepare(properties, {}) == {"a": None, "b": False}


def test_a_default_is_each_calls_own_copy() -> None:
    spec = build_spec(properties={"names": {"type": "array", "default": []}})
    prepare_arguments(spec, {})[0]["names"].append("x")
    assert prepare_arguments(spec, {})[0] == {"names": []}


def test_a_default_that_breaks_its_own_schema_is_refused_like_any_value() -> None:
    assert "minimum" in complaint({"limit": {"type": "integer", "minimum": 5, "default": 1}}, {})


FLAT = {
    **LIMITS,
    "mode": {"type": "string", "enum": ["a", "b"], "default": "a"},
    "ratio": {"type": "number", "exclusiveMinimum": 0},
}
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 12), st.floats(allow_nan=False), st.sampled_from(["", "a", "b", "x"])
)


@given(st.dictionaries(st.sampled_from(list(FLAT)), VALUES), st.sets(st.sampled_from(list(FLAT))))
def test_arguments_are_accepted_exactly_if_they_fit_the_schema_with_their_defaults(
    arguments: dict[str, Any], required: set[str]
) -> None:
    spec = build_spec(properties=FLAT, required=sorted(required))
    whole = {"limit": 10, "mode": "a"} | arguments
    is_whole = not isinstance(whole["limit"], bool | float)
    fits = is_whole and Draft202012Validator(spec.parameters).is_valid(whole)
    try:
        accepted = prepare_arguments(spec, arguments)[0]
    except ToolFailure:
        assert not fits
    else:
        assert fits
        assert accepted == whole


BOUNDS = st.fixed_dictionaries(
    {"type": st.sampled_from(["string", "integer", "number", "boolean", "array", ["string", "null"]])},
    optional={
        "minLength": st.integers(0, 3),
        "maxLength": st.integers(0, 3),
        "minimum": st.integers(-3, 3) | st.floats(-3, 3),
        "exclusiveMaximum": st.integers(-3, 3),
        "enum": st.lists(st.sampled_from(["", "a", 1, 1.0, True, None]), min_size=1),
        "pattern": st.just("a"),
    },
)


@given(
    schema=BOUNDS,
    value=st.text("ab", max_size=4)
    | st.integers(-4, 4)
    | st.floats()
    | st.booleans()
    | st.none()
    | st.lists(st.none()),
)
def test_a_value_is_accepted_exactly_if_it_fits_the_bounds_of_its_parameter(schema: dict[str, Any], value: Any) -> None:
    """Most schemas are checked without jsonschema."""
    is_wrong_number = schema["type"] == "integer" and isinstance(value, float)
    fits = not is_wrong_number and Draft202012Validator(schema).is_valid(value)
    try:
        prepare({"a": schema}, {"a": value})
        is_accepted = True
    except ToolFailure:
        is_accepted = False
    assert is_accepted == fits


def test_a_default_inside_an_object_is_filled() -> None:
    properties = {"options": {"type": "object", "properties": {"depth": {"type": "integer", "default": 3}}}}
    assert prepare(properties, {"options": {}}) == {"options": {"depth": 3}}


def test_defaults_of_objects_in_a_list_are_filled_and_the_callers_list_stays() -> None:
    item = {"type": "object", "properties": {"all": {"type": "boolean", "default": False}}}
    given = {"edits": [{}, {"all": True}]}
    assert prepare({"edits": {"type": "array", "items": item}}, given) == {"edits": [{"all": False}, {"all": True}]}
    assert given == {"edits": [{}, {"all": True}]}


def test_the_callers_arguments_are_left_as_they_were() -> None:
    given = {"query": "a"}
    prepare(LIMITS, given)
    assert given == {"query": "a"}


# Types


@pytest.mark.parametrize(
    ("kind", "value", "named"),
    [
        ("integer", "5", "string"),
        ("integer", 5.5, "number"),
        ("number", "5", "string"),
        ("string", 5, "integer"),
        ("string", None, "null"),
        ("boolean", 1, "integer"),
        ("boolean", "true", "string"),
        ("array", {}, "object"),
        ("object", [], "array"),
        ("null", 0, "integer"),
    ],
)
def test_a_wrong_type_is_refused_with_what_is_wanted_and_what_came(kind: str, value: Any, named: str) -> None:
    sentence = complaint({"x": {"type": kind}}, {"x": value})
    assert f"'x' must be {kind}, not {named} {json.dumps(value)}" in sentence


def test_a_boolean_is_no_integer() -> None:
    assert "'x' must be integer, not boolean true" in complaint({"x": {"type": "integer"}}, {"x": True})


def test_a_float_for_an_integer_is_called_a_number() -> None:
    assert "must be integer, not number 5.0" in complaint({"x": {"type": "integer"}}, {"x": 5.0})


def test_a_wrong_type_inside_is_named_by_its_path() -> None:
    properties = {"edits": {"type": "array", "items": {"type": "object", "properties": {"old": {"type": "string"}}}}}
    assert "'edits.1.old'" in complaint(properties, {"edits": [{"old": "a"}, {"old": 1}]})


def test_several_types_are_all_named() -> None:
    assert "string or null" in complaint({"x": {"type": ["string", "null"]}}, {"x": 1})


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("integer", 5),
        ("integer", 10**30),
        ("number", 5),
        ("number", 5.5),
        ("string", ""),
        ("boolean", False),
        ("null", None),
        ("array", []),
        ("object", {}),
    ],
)
def test_a_right_type_passes_unchanged(kind: str, value: Any) -> None:
    assert prepare({"x": {"type": kind}}, {"x": value}) == {"x": value}


def test_a_missing_required_parameter_is_named() -> None:
    assert "'query' is required" in complaint(LIMITS, {}, required=["query"])


def test_every_fault_is_told_at_once() -> None:
    sentence = complaint({**LIMITS, "mode": {"enum": ["a", "b"]}}, {"limit": 0, "mode": "c"}, required=["query"])
    assert all(word in sentence for word in ("'query'", "'limit'", "'mode'"))


def test_a_value_outside_an_enumeration_is_told_what_is_allowed() -> None:
    assert "['a', 'b']" in complaint({"mode": {"enum": ["a", "b"]}}, {"mode": "c"})


def test_a_long_value_does_not_make_a_long_sentence() -> None:
    assert len(complaint({"x": {"type": "string", "maxLength": 5}}, {"x": "y" * 100_000})) < 500


# Unknown names


def test_an_unknown_parameter_is_refused_with_the_nearest_and_the_known_ones() -> None:
    sentence = complaint(LIMITS, {"qeury": "a"})
    assert "unknown parameter 'qeury'; did you mean 'query'?" in sentence
    assert "Known parameters: limit, query" in sentence


def test_a_long_unknown_name_does_not_make_a_long_sentence() -> None:
    assert len(complaint(LIMITS, {"y" * 100_000: 1})) < 500


def test_nothing_near_is_not_suggested() -> None:
    assert "did you mean" not in complaint(LIMITS, {"zzzz": 1})


def test_the_known_ones_are_a_sentence_of_their_own() -> None:
    assert "unknown parameter 'zzzz'. Known parameters" in complaint(LIMITS, {"zzzz": 1})


def test_a_tool_without_parameters_says_none() -> None:
    assert "Known parameters: none" in complaint({}, {"a": 1})


def test_a_schema_that_is_silent_about_unknown_names_refuses_them() -> None:
    spec = build_spec().model_copy(update={"parameters": {"type": "object", "properties": {}}})
    with pytest.raises(ToolFailure, match="unknown parameter"):
        prepare_arguments(spec, {"a": 1})


def test_a_schema_that_allows_more_takes_more() -> None:
    spec = build_spec().model_copy(update={"parameters": {"type": "object", "additionalProperties": True}})
    assert prepare_arguments(spec, {"a": 1})[0] == {"a": 1}


# Aliases


@pytest.fixture
def aliased() -> Any:
    return build_spec(
        properties={"file_path": {"type": "string"}}, aliases={"path": "file_path", "filename": "file_path"}
    )


def test_an_alias_becomes_its_canonical_name_and_is_noted(aliased: Any) -> None:
    assert prepare_arguments(aliased, {"path": "a"}) == ({"file_path": "a"}, ["path -> file_path"])
    assert prepare_arguments(aliased, {"file_path": "a"}) == ({"file_path": "a"}, [])


@pytest.mark.parametrize(
    "arguments", [{"path": "a", "file_path": "b"}, {"file_path": "a", "path": "b"}, {"path": "a", "filename": "b"}]
)
def test_a_parameter_given_under_two_names_is_refused(aliased: Any, arguments: dict[str, str]) -> None:
    with pytest.raises(ToolFailure, match="give it once"):
        prepare_arguments(aliased, arguments)


# Text of a text dialect

COERCED = [
    ("integer", "5", 5),
    ("integer", " 5 ", 5),
    ("integer", "-7", -7),
    ("integer", "123456789012345678901234567890", 123456789012345678901234567890),
    ("number", "5", 5),
    ("number", "2.5", 2.5),
    ("number", "1e3", 1000.0),
    ("string", "5", "5"),
    ("string", "true", "true"),
    ("string", " padded ", " padded "),
    ("null", "null", None),
    ("array", '["a", 1]', ["a", 1]),
    ("object", '{"a": {"b": 1}}', {"a": {"b": 1}}),
    (["integer", "string"], "5", "5"),
]


@pytest.mark.parametrize(("kind", "text", "value"), COERCED)
def test_text_is_read_as_the_schemas_type(kind: Any, text: str, value: Any) -> None:
    prepared = prepare({"x": {"type": kind}}, {"x": text}, text=True)["x"]
    assert (prepared, type(prepared)) == (value, type(value))


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("boolean", "true", True),
        ("boolean", "false", False),
        (["integer", "null"], "null", None),
        (["boolean", "null"], "true", True),
    ],
)
def test_text_is_read_as_a_boolean_or_as_one_of_several_types(kind: Any, text: str, value: Any) -> None:
    prepared = prepare({"x": {"type": kind}}, {"x": text}, text=True)["x"]
    assert (prepared, type(prepared)) == (value, type(value))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("integer", "5.5"),
        ("integer", "five"),
        ("integer", "05"),
        ("integer", "0x10"),
        ("integer", "1_000"),
        ("integer", "٥"),
        ("integer", ""),
        ("integer", "true"),
        ("integer", "NaN"),
        ("number", "Infinity"),
        ("number", "NaN"),
        ("number", "1e999"),
        ("number", "1,5"),
        ("boolean", "True"),
        ("boolean", "1"),
        ("boolean", "yes"),
        ("array", "a, b"),
        ("array", '{"a": 1}'),
        ("object", "[1]"),
        ("null", ""),
    ],
)
def test_text_that_is_not_exactly_of_the_type_stays_text_and_is_refused(kind: str, text: str) -> None:
    sentence = complaint({"x": {"type": kind}}, {"x": text}, text=True)
    assert f"must be {kind}, not string" in sentence


def test_text_of_a_whole_float_is_refused_as_the_text_it_is() -> None:
    assert 'string "5.0"' in complaint({"x": {"type": "integer"}}, {"x": "5.0"}, text=True)


def test_without_the_text_flag_nothing_is_read_as_another_type() -> None:
    assert prepare({"x": {"type": "string"}}, {"x": "5"}) == {"x": "5"}
    assert prepare({"x": {}}, {"x": "5"}, text=True) == {"x": "5"}


def test_text_of_a_giant_number_is_a_number() -> None:
    # As a native call may send it: any integer is a number.
    assert prepare({"x": {"type": "number"}}, {"x": "1" + "0" * 400}, text=True) == {"x": 10**400}


def test_text_that_nests_too_deep_is_refused() -> None:
    complaint({"x": {"type": "array"}}, {"x": "[" * 100_000}, text=True)


def test_a_number_of_more_digits_than_python_reads_stays_text() -> None:
    assert prepare({"x": {"type": ["integer", "string"]}}, {"x": "1" * 5000}, text=True) == {"x": "1" * 5000}


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(["integer", "number", "boolean", "array", "object", "null", "string"]),
    text=st.text(max_size=30),
)
def test_any_text_is_of_its_type_or_refused(kind: str, text: str) -> None:
    try:
        value = prepare({"x": {"type": kind}}, {"x": text}, text=True)["x"]
    except ToolFailure:
        return
    assert isinstance(
        value,
        {"integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict, "string": str}.get(
            kind, type(None)
        ),
    )


# Custom checks


def test_a_custom_check_sees_arguments_that_are_already_valid_and_whole() -> None:
    seen: list[Any] = []
    prepare(LIMITS, {"query": "a"}, checks=[lambda arguments: seen.append(dict(arguments))])
    assert seen == [{"query": "a", "limit": 10}]


def test_a_custom_check_that_complains_refuses_with_its_own_sentence() -> None:
    assert complaint(LIMITS, {}, checks=[lambda _: None, lambda _: "limit and query exclude each other"]) == (
        "echo: limit and query exclude each other"
    )


def test_a_custom_check_is_not_asked_about_invalid_arguments() -> None:
    def never(_: Any) -> str:
        raise AssertionError("asked")

    complaint(LIMITS, {"limit": 0}, checks=[never])


# Schemas


@pytest.mark.parametrize(
    "schema", [{"type": "objct"}, {"properties": []}, {"required": "a"}, {"properties": {"a": {"minimum": "x"}}}]
)
def test_a_schema_that_is_none_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(SchemaError):
        check_schema(schema)


def test_a_good_schema_is_accepted() -> None:
    check_schema(build_spec(properties=LIMITS).parameters)


def test_a_schema_of_something_else_than_an_object_is_refused() -> None:
    with pytest.raises(SchemaError):
        check_schema({"type": "string"})


@pytest.mark.parametrize(
    "reference", ["http://127.0.0.1:1/x.json", "file:///etc/passwd", "other.json", "#/$defs/nothing", "#/$defs/a/b", ""]
)
def test_a_schema_that_refers_to_what_is_not_within_it_is_refused(reference: str) -> None:
    parameters = {
        "type": "object",
        "properties": {"x": {"items": [{"$ref": reference}]}},
        "$defs": {"a": {"type": "string"}},
    }
    with pytest.raises(SchemaError, match="not within it"):
        check_schema({**parameters, "properties": {"x": {"anyOf": [{"$ref": reference}]}}})


def test_a_schema_may_refer_to_its_own_parts() -> None:
    check_schema(
        {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/a~1b"}, "y": {"$ref": "#"}},
            "$defs": {"a/b": {"type": "string"}},
        }
    )


def test_checking_arguments_never_fetches_what_a_schema_refers_to(tmp_path: Path) -> None:
    (tmp_path / "any.json").write_text("{}")
    spec = build_spec(properties={"x": {"$ref": (tmp_path / "any.json").as_uri()}})
    with pytest.raises(ToolFailure, match="refers to"):
        prepare_arguments(spec, {"x": 1})
