"""Arguments against a schema: aliases, coercion of text, defaults, checks, and the error message for a model."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, SchemaError

from tests.support.records.builders import build_spec
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.registry import Switch, Tool, ToolRegistry
from toolcrew.contract.schema import check_schema, is_quick, prepare_arguments

LIMITS = {"limit": {"type": "integer", "minimum": 1, "default": 10}, "query": {"type": "string"}}


def prepare(
    properties: dict[str, Any], arguments: dict[str, Any], *, required: list[str] | None = None, **options: Any
) -> dict[str, Any]:
    return prepare_arguments(build_spec(properties=properties, required=required), arguments, **options)[0]


def refusal_of(properties: dict[str, Any], arguments: dict[str, Any], **options: Any) -> str:
    """Return the error message for refused arguments. Any exception except ToolFailure fails the test."""
    with pytest.raises(ToolFailure) as refused:
        prepare(properties, arguments, **options)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
    return refused.value.message


FLAT = {
    **LIMITS,
    "mode": {"type": "string", "enum": ["a", "b"], "default": "a"},
    "ratio": {"type": "number", "exclusiveMinimum": 0},
}
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 12), st.floats(allow_nan=False), st.sampled_from(["", "a", "b", "x"])
)


@given(st.dictionaries(st.sampled_from(list(FLAT)), VALUES), st.sets(st.sampled_from(list(FLAT))))
def test_arguments_are_accepted_only_if_they_match_the_schema(arguments: dict[str, Any], required: set[str]) -> None:
    spec = build_spec(properties=FLAT, required=sorted(required))
    meant = {name: value for name, value in arguments.items() if value is not None or name in required}
    expected = {"limit": 10, "mode": "a"} | meant
    fits = Draft202012Validator(spec.parameters).is_valid(expected)
    try:
        accepted = prepare_arguments(spec, arguments)[0]
    except ToolFailure:
        assert not fits
    else:
        assert fits
        assert accepted == expected
        assert type(accepted["limit"]) is int


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
def test_a_value_is_accepted_only_if_it_matches_its_parameter(schema: dict[str, Any], value: Any) -> None:
    """Most schemas are checked without jsonschema."""
    fits = Draft202012Validator(schema).is_valid(value)
    try:
        prepare({"a": schema}, {"a": value}, required=["a"])
        is_accepted = True
    except ToolFailure:
        is_accepted = False
    assert is_accepted == fits


def test_defaults_are_added_to_a_copy_of_the_arguments() -> None:
    item = {"type": "object", "properties": {"all": {"type": "boolean", "default": False}}}
    arguments = {"edits": [{}, {"all": True}]}
    prepared = prepare({**LIMITS, "edits": {"type": "array", "items": item}}, arguments)
    assert prepared == {"limit": 10, "edits": [{"all": False}, {"all": True}]}
    assert arguments == {"edits": [{}, {"all": True}]}


@pytest.mark.parametrize(
    ("kind", "value", "given_type"),
    [
        ("integer", "5", "string"),
        ("integer", 5.5, "number"),
        ("integer", True, "boolean"),
        ("string", None, "null"),
        ("boolean", "true", "string"),
    ],
)
def test_a_wrong_type_is_refused_with_the_expected_and_actual_type(kind: str, value: Any, given_type: str) -> None:
    message = refusal_of({"x": {"type": kind}}, {"x": value}, required=["x"])
    assert f"'x' must be {kind}, not {given_type} {json.dumps(value)}" in message


LIST, OBJECT = {"type": "array", "items": {"type": "integer"}}, {"type": "object"}
CONTAINER_TEXTS = [
    (LIST, "[1271, 2106]", [1271, 2106]),
    ({"anyOf": [LIST, {"type": "null"}]}, " [1]\n", [1]),
    ({"oneOf": [{"type": "null"}, {"anyOf": [OBJECT, LIST]}]}, "[1]", [1]),
    ({"type": ["array", "null"]}, "[]", []),
    (OBJECT, '{"k": "a\n"}', {"k": "a\n"}),
    # May be a text, so the text is meant.
    ({"type": ["array", "string"]}, "[1]", "[1]"),
    ({"anyOf": [LIST, {"type": "string"}]}, "[1]", "[1]"),
    ({"type": "string"}, "[1]", "[1]"),
    ({}, "[1]", "[1]"),
    ({"anyOf": [LIST, {}]}, "[1]", "[1]"),
]


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize(("schema", "value", "prepared"), CONTAINER_TEXTS)
def test_a_list_or_object_in_a_json_text_is_read_if_the_parameter_is_no_text(
    schema: dict[str, Any], value: str, prepared: Any, text: bool
) -> None:
    assert prepare({"x": schema}, {"x": value}, text=text)["x"] == prepared


@pytest.mark.parametrize("value", ["[1", "[1] and more", '{"a": 1}', "1, 2", "[" * 100_000, f"[{'1,' * 20_000}1]"])
def test_another_text_for_a_list_is_refused(value: str) -> None:
    assert "must be array, not string" in refusal_of({"x": LIST}, {"x": value}, required=["x"])


def test_aliases_in_a_list_that_is_a_json_text_are_replaced() -> None:
    item = {"type": "object", "properties": {"old_string": {"type": "string"}}}
    spec = build_spec(properties={"edits": {"type": "array", "items": item}}, aliases={"oldString": "old_string"})
    assert prepare_arguments(spec, {"edits": '[{"oldString": "a"}]'})[0] == {"edits": [{"old_string": "a"}]}


def test_a_long_json_text_is_not_quick() -> None:
    spec = build_spec(properties={"x": {"anyOf": [LIST, {"type": "null"}]}, "y": {"type": "string"}})
    assert not is_quick(spec, {"x": "[" + "1," * 2_000 + "1]"})
    assert is_quick(spec, {"y": "[" + "1," * 2_000 + "1]"})


@pytest.mark.parametrize("schema", [{"type": "integer"}, {"anyOf": [{"type": "integer"}, {"type": "null"}]}])
def test_a_text_dialect_converts_a_number_in_every_form_of_an_optional_parameter(schema: dict[str, Any]) -> None:
    assert prepare({"x": schema}, {"x": "5"}, text=True) == {"x": 5}


@pytest.mark.parametrize(
    ("step", "value", "fits"),
    [(0.01, 19.99, True), (0.1, 0.3, True), (0.01, 19.999, False), (0.5, 10**400 + 1, True), (7, 10**400, False)],
    ids=lambda value: f"{value}"[:9],
)
def test_multiples_are_those_of_the_numbers_as_written(step: float, value: float, fits: bool) -> None:
    schema = {"x": {"type": "number", "multipleOf": step}}
    if fits:
        assert prepare(schema, {"x": value}) == {"x": value}
    else:
        assert "is not a multiple of" in refusal_of(schema, {"x": value})


def test_a_required_parameter_without_a_schema_can_be_given() -> None:
    spec = build_spec(parameters={"type": "object", "properties": {"a": {}}, "required": ["b"]})
    assert prepare_arguments(spec, {"a": 1, "b": 2})[0] == {"a": 1, "b": 2}


EDITS = {"type": "array", "items": {"type": "object", "properties": {"old": {"type": "string"}}}}


@pytest.mark.parametrize(
    ("properties", "arguments", "facts"),
    [
        ({"limit": {"type": "integer", "minimum": 5, "default": 6}}, {"limit": 1}, ["minimum"]),
        pytest.param({"edits": EDITS}, {"edits": [{"old": "a"}, {"old": 1}]}, ["'edits.1.old'"], id="path of a value"),
        pytest.param({"x": {"type": ["string", "null"]}}, {"x": 1}, ["string or null"], id="several types"),
        pytest.param({"mode": {"enum": ["a", "b"]}}, {"mode": "c"}, ["['a', 'b']"], id="allowed values"),
        (LIMITS, {"qeury": "a"}, ["'qeury'; did you mean 'query'?", "limit, query"]),
        pytest.param(LIMITS, {"zzzz": 1}, ["parameter 'zzzz'. Known parameters"], id="no similar parameter"),
        pytest.param({}, {"a": 1}, ["Known parameters: none"], id="no parameters"),
    ],
)
def test_the_error_message_names_the_violated_rule(
    properties: dict[str, Any], arguments: dict[str, Any], facts: list[str]
) -> None:
    message = refusal_of(properties, arguments)
    assert [fact for fact in facts if fact not in message] == []


@pytest.mark.parametrize("arguments", [{"query": "y" * 100_000}, {"y" * 100_000: 1}], ids=["long value", "long name"])
def test_long_arguments_are_shortened_in_the_message(arguments: dict[str, Any]) -> None:
    assert len(refusal_of({"query": {"type": "string", "maxLength": 5}}, arguments)) < 500


# Values that mean nothing, and other notations of a value


NODE = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": ["string", "null"]}}}
PLAIN = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        pytest.param({"type": "string"}, None, "absent", id="optional text"),
        pytest.param({"type": ["string", "null"]}, None, None, id="null is a value"),
        pytest.param({}, None, None, id="any value"),
        pytest.param({"enum": ["a", "b"]}, None, "absent", id="enum"),
        pytest.param({"const": 1}, None, "absent", id="const"),
        pytest.param({"anyOf": [{"type": "string"}, {"type": "integer"}]}, None, "absent", id="alternatives"),
        pytest.param({"anyOf": [{"type": "string"}, {"type": "null"}]}, None, None, id="an alternative admits null"),
        pytest.param({"$ref": "#/$defs/text"}, None, "absent", id="reference"),
        pytest.param({"type": "integer", "default": 7}, None, 7, id="null means the default"),
        pytest.param({"type": "integer", "default": None}, None, "absent", id="null is a default that does not fit"),
        pytest.param(NODE, {"n": None, "s": None}, {"s": None}, id="nested"),
        pytest.param({"type": "array", "items": PLAIN}, [{"n": 1, "s": None}], [{"n": 1}], id="in a list"),
        pytest.param({"prefixItems": [NODE]}, [{"n": None}], [{}], id="in a tuple"),
        pytest.param({"additionalProperties": NODE}, {"k": {"n": None}}, {"k": {}}, id="in a map"),
        pytest.param({"oneOf": [{"type": "string"}, PLAIN]}, {"n": 1, "s": None}, {"n": 1}, id="in an alternative"),
        pytest.param({"allOf": [PLAIN, {"minProperties": 1}]}, {"n": 1.0, "s": None}, {"n": 1}, id="in allOf"),
        pytest.param({"type": "integer"}, 1.0, 1, id="whole number"),
        pytest.param({"type": "integer"}, 1e3, 1000, id="exponent"),
        pytest.param({"type": ["integer", "null"]}, -0.0, 0, id="negative zero"),
        pytest.param({"type": "number"}, 2.0, 2.0, id="a number stays a number"),
        pytest.param({"anyOf": [{"type": "string"}, {"type": "integer"}]}, 3.0, 3, id="whole number, alternatives"),
        pytest.param({"type": "array", "items": {"type": "integer"}}, [1.0, 2, 3e0], [1, 2, 3], id="whole, list"),
        pytest.param({"type": "integer", "minimum": 1, "maximum": 5}, 5.0, 5, id="whole number within bounds"),
    ],
)
def test_a_value_that_means_the_same_in_another_notation_is_accepted(schema: Any, value: Any, expected: Any) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": {"text": {"type": "string"}}}
    arguments = {"x": value}
    before = json.dumps(arguments)
    prepared = prepare_arguments(build_spec().model_copy(update={"parameters": parameters}), arguments)[0]
    assert json.dumps(prepared) == json.dumps({} if expected == "absent" else {"x": expected})
    assert json.dumps(arguments) == before, "the caller's values do not change"


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (PLAIN, {"n": None}),
        ({"type": "array", "items": {"type": "string"}}, [None]),
        ({"type": "integer"}, 1.5),
        ({"type": "integer"}, 1e999),
        ({"type": "integer"}, ""),
        ({"type": "integer"}, "null"),
        ({"type": "integer", "maximum": 4}, 5.0),
        ({"allOf": [PLAIN, {"required": ["s"]}]}, {"n": 1, "s": None}),
    ],
)
def test_a_value_that_could_mean_something_else_is_refused(schema: Any, value: Any) -> None:
    refusal_of({"x": schema}, {"x": value})


def test_null_for_a_required_parameter_is_refused_and_the_optional_null_is_not_named() -> None:
    message = refusal_of(
        {"q": {"type": "string"}, "path": {"type": "string"}}, {"q": None, "path": None}, required=["q"]
    )
    assert "'q' must be string, not null" in message
    assert "path" not in message


UNFIT = [{"type": "integer", "default": None}, {"type": "string", "default": 5}, {"enum": ["a"], "default": "b"}]


@pytest.mark.parametrize(
    "schema",
    [
        *UNFIT,
        {"type": "array", "items": {"type": "string"}, "default": [1]},
        {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}, "default": {}},
        {"type": "object", "properties": {"n": {"minimum": 1, "default": 0}}, "minProperties": 1, "default": {}},
        {"anyOf": [{"type": "string"}], "default": {"a": 1}},
    ],
)
def test_a_default_that_does_not_fit_its_schema_is_not_filled_in(schema: Any) -> None:
    assert prepare({"x": schema}, {}) == {}
    nested = {"type": "array", "items": {"type": "object", "properties": {"x": schema}}}
    assert prepare({"a": nested}, {"a": [{}, {}]}) == {"a": [{}, {}]}
    assert "x" in refusal_of({"x": schema}, {}, required=["x"])


def test_a_default_in_another_notation_is_filled_in_as_an_integer() -> None:
    for more in ({}, {"y": {"anyOf": [{}]}}):
        assert json.dumps(prepare({"x": {"type": "integer", "default": 10.0}, **more}, {})) == '{"x": 10}'


def test_an_unfit_default_does_not_hide_an_error_of_the_caller() -> None:
    message = refusal_of({"n": {"type": "integer", "default": None}, "q": {"type": "string"}}, {"q": 1})
    assert "'q' must be string" in message
    assert "'n'" not in message


@pytest.mark.parametrize("text", ["", " ", "null", "None"])
def test_empty_text_and_null_mean_absence_only_for_an_optional_parameter_that_is_no_text(text: str) -> None:
    assert prepare({"x": {"type": "integer", "default": 3}}, {"x": text}, text=True) == {"x": 3}
    assert prepare({"x": {"type": ["boolean", "array"]}}, {"x": text}, text=True) == {}
    assert prepare({"x": {"type": "string"}}, {"x": text}, text=True) == {"x": text}
    refusal_of({"x": {"type": "integer"}}, {"x": text}, text=True, required=["x"])


@pytest.fixture
def aliased() -> Any:
    return build_spec(
        properties={"file_path": {"type": "string"}}, aliases={"path": "file_path", "filename": "file_path"}
    )


def test_an_alias_is_replaced_by_its_canonical_name_and_reported(aliased: Any) -> None:
    assert prepare_arguments(aliased, {"path": "a"}) == ({"file_path": "a"}, ["path -> file_path"])
    assert prepare_arguments(aliased, {"file_path": "a"}) == ({"file_path": "a"}, [])


@pytest.mark.parametrize(
    "arguments", [{"path": "a", "file_path": "b"}, {"file_path": "a", "path": "b"}, {"path": "a", "filename": "b"}]
)
def test_a_parameter_with_two_names_is_refused(aliased: Any, arguments: dict[str, str]) -> None:
    with pytest.raises(ToolFailure, match="give it once"):
        prepare_arguments(aliased, arguments)


@pytest.mark.parametrize(
    "arguments", [{"path": None, "file_path": "b"}, {"file_path": "b", "path": None}, {"path": "b", "filename": None}]
)
def test_a_null_beside_another_name_of_the_parameter_means_nothing(aliased: Any, arguments: dict[str, Any]) -> None:
    assert prepare_arguments(aliased, arguments)[0] == {"file_path": "b"}


COERCIONS = [
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
    ("boolean", "true", True),
    ("boolean", "false", False),
    ("boolean", "True", True),
    ("integer", "5.0", 5),
    ("integer", "1e3", 1000),
    ("integer", "+5", 5),
    ("integer", "5.", 5),
    ("number", ".5", 0.5),
    ("number", "-.5", -0.5),
    (["integer", "null"], "None", None),
    (["integer", "null"], "null", None),
    (["boolean", "null"], "true", True),
    # Any integer is a number, as in a native call.
    ("number", "1" + "0" * 400, 10**400),
    # Python does not read a number with so many digits.
    (["integer", "string"], "1" * 5000, "1" * 5000),
]


@pytest.mark.parametrize(("kind", "text", "value"), COERCIONS, ids=lambda value: str(value)[:20])
def test_text_is_converted_to_the_schema_type(kind: Any, text: str, value: Any) -> None:
    prepared = prepare({"x": {"type": kind}}, {"x": text}, text=True)["x"]
    assert (prepared, type(prepared)) == (value, type(value))


INVALID_TEXTS = {
    "integer": ["5.5", ".", "+", "five", "05", "0x10", "1_000", "٥", "", "true", "NaN"],
    "number": ["Infinity", "NaN", "1e999", "1,5"],
    "boolean": ["TRUE", "1", "yes"],
    "array": ["a, b", '{"a": 1}'],
    "object": ["[1]"],
    "null": [""],
}


@pytest.mark.parametrize("kind", INVALID_TEXTS)
def test_text_that_does_not_match_the_schema_type_is_refused(kind: str) -> None:
    for text in INVALID_TEXTS[kind]:
        message = refusal_of({"x": {"type": kind}}, {"x": text}, text=True, required=["x"])
        assert f"must be {kind}, not string {json.dumps(text, ensure_ascii=False)}" in message
    refusal_of({"x": {"type": "array"}}, {"x": "[" * 100_000}, text=True)


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(["integer", "number", "boolean", "array", "object", "null", "string"]),
    text=st.text(max_size=30),
)
def test_any_text_is_converted_or_refused(kind: str, text: str) -> None:
    try:
        value = prepare({"x": {"type": kind}}, {"x": text}, text=True, required=["x"])["x"]
    except ToolFailure:
        return
    assert isinstance(
        value,
        {"integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict, "string": str}.get(
            kind, type(None)
        ),
    )


@pytest.mark.parametrize(
    "schema",
    [
        *({"type": kind} for kind in ("objct", "string")),
        *({"properties": properties} for properties in ([], {"a": {"minimum": "x"}})),
        {"required": "a"},
    ],
)
def test_an_invalid_parameter_schema_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(SchemaError):
        check_schema(schema)


@pytest.mark.parametrize(
    "reference", ["http://127.0.0.1:1/x.json", "file:///etc/passwd", "other.json", "#/$defs/nothing", "#/$defs/a/b", ""]
)
def test_a_reference_outside_the_schema_is_refused(reference: str) -> None:
    parameters = {
        "type": "object",
        "properties": {"x": {"items": [{"$ref": reference}]}},
        "$defs": {"a": {"type": "string"}},
    }
    with pytest.raises(SchemaError, match="not within it"):
        check_schema({**parameters, "properties": {"x": {"anyOf": [{"$ref": reference}]}}})


def test_a_reference_within_the_schema_is_accepted() -> None:
    check_schema(build_spec(properties=LIMITS).parameters)
    check_schema(
        {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/a~1b"}, "y": {"$ref": "#"}},
            "$defs": {"a/b": {"type": "string"}},
        }
    )


def test_checking_arguments_fetches_no_external_schema(tmp_path: Path) -> None:
    (tmp_path / "any.json").write_text("{}")
    spec = build_spec(properties={"x": {"$ref": (tmp_path / "any.json").as_uri()}})
    with pytest.raises(ToolFailure, match="refers to"):
        prepare_arguments(spec, {"x": 1})


def build_tool(name: str, handler: str = "handler") -> Tool[str]:
    return Tool(build_spec(name), handler)


def list_names(registry: ToolRegistry[str], *selectors: str) -> list[str]:
    return [spec.name for spec in registry.specs(selectors or "all")]


def test_a_tool_with_an_invalid_schema_is_refused_when_it_is_registered() -> None:
    spec = build_spec().model_copy(update={"parameters": {"type": "string"}})
    with pytest.raises(SchemaError):
        ToolRegistry([Tool(spec, "handler")])


def test_a_replaced_tool_stays_disabled_until_it_is_enabled() -> None:
    registry = ToolRegistry([build_tool("a", "old")])
    registry.disable("a")
    registry.register(build_tool("a", "new"))
    assert list_names(registry) == []
    assert registry.enable("a")
    assert (list_names(registry), registry.switch("a")) == (["a"], None)


def test_threads_disable_enable_and_list_tools_concurrently() -> None:
    registry = ToolRegistry([build_tool(f"tool-{number}") for number in range(20)])

    def work(number: int) -> None:
        for _ in range(10):
            registry.disable(f"tool-{number}")
            assert len(registry.describe()) == 20
            assert f"tool-{number}" not in list_names(registry)
            registry.enable(f"tool-{number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(20)))
    assert len(list_names(registry)) == 20


def test_a_disabled_tool_is_described_but_not_offered_to_a_model() -> None:
    tool = build_tool("a")
    registry = ToolRegistry([tool, build_tool("b")])
    assert registry.disable("a", Switch(by="ada"))
    assert registry.get("a") is tool
    assert list_names(registry) == ["b"]
    assert list_names(registry, "a", "all") == ["b"]
    assert [(state.name, state.description, state.state) for state in registry.describe()] == [
        ("a", "The tool a.", "disabled"),
        ("b", "The tool b.", "enabled"),
    ]
    assert (registry.switch("a"), registry.switch("b")) == (Switch(by="ada"), None)


def test_an_empty_registry_can_neither_disable_nor_enable_a_tool() -> None:
    registry: ToolRegistry[str] = ToolRegistry()
    assert (registry.disable("a"), registry.enable("a"), registry.describe()) == (False, False, [])
    assert (len(registry), registry.specs()) == (0, [])


def test_a_session_tool_cannot_be_disabled() -> None:
    registry = ToolRegistry([Tool(build_spec("session.open", audience="session"), "handler")])
    with pytest.raises(ValueError, match="cannot be disabled"):
        registry.disable("session.open")
