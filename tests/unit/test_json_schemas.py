"""JSON Schemas adapted for a model, without loss of meaning."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from contract.functions.json_schemas import close_schema, drop_titles, plain_schema

POINT = {"title": "Point", "type": "object", "properties": {"x": {"type": "integer", "title": "X"}}}


def test_a_reference_is_replaced_and_what_stands_beside_it_wins() -> None:
    schema = {
        "properties": {"at": {"$ref": "#/$defs/Point", "description": "here"}},
        "$defs": {"Point": {**POINT, "description": "any"}},
    }
    assert plain_schema(schema) == {
        "properties": {"at": {"type": "object", "description": "here", "properties": {"x": {"type": "integer"}}}},
    }


def test_definitions_that_contain_each_other_stay_whole() -> None:
    def refers(name: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"next": {"$ref": f"#/$defs/{name}"}}}

    plain = plain_schema({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": refers("B"), "B": refers("A")}})
    assert plain["properties"]["a"] == {"$ref": "#/$defs/A"}
    assert plain["$defs"]["A"]["properties"]["next"]["properties"]["next"] == {"$ref": "#/$defs/A"}


def test_definitions_that_double_at_every_level_stay_small() -> None:
    twice = {f"D{i}": {"properties": {side: {"$ref": f"#/$defs/D{i + 1}"} for side in "ab"}} for i in range(30)}
    plain = plain_schema({"properties": {"a": {"$ref": "#/$defs/D0"}}, "$defs": {**twice, "D30": {"type": "integer"}}})
    assert len(str(plain)) < 100_000
    validator = Draft202012Validator(plain)
    assert validator.is_valid({"a": {"b": {"a": {"b": {}}}}})
    value: Any = "no integer"
    for side in "ba" * 15:
        value = {side: value}
    assert not validator.is_valid({"a": value})


def test_a_property_called_title_and_a_default_with_one_stay() -> None:
    schema = {"title": "T", "properties": {"title": {"title": "Title", "type": "string"}}, "default": {"title": "kept"}}
    assert drop_titles(schema) == {"properties": {"title": {"type": "string"}}, "default": {"title": "kept"}}


NULL = {"type": "null"}
UNIONS: list[tuple[list[Any], dict[str, Any] | None]] = [
    ([{"type": "integer"}, NULL], {"type": ["integer", "null"]}),
    ([{"type": "integer", "minimum": 1}, NULL], {"type": ["integer", "null"], "minimum": 1}),
    ([{"type": "integer"}, {"type": "string"}], {"type": ["integer", "string"]}),
    (
        [{"type": "array", "items": {"type": "integer"}}, NULL],
        {"type": ["array", "null"], "items": {"type": "integer"}},
    ),
    ([{"type": "string", "enum": ["a"]}, NULL], None),
    ([{"type": "string", "const": "a"}, NULL], None),
    ([{"$ref": "#/$defs/A"}, NULL], None),
    ([{"type": "string", "maxLength": 2}, {"type": "string"}], None),
]


@pytest.mark.parametrize(("branches", "merged"), UNIONS, ids=range(len(UNIONS)))
def test_a_union_is_reported_as_types_only_where_that_means_the_same(
    branches: list[Any], merged: dict[str, Any] | None
) -> None:
    assert plain_schema({"anyOf": branches}, null_as_type=True) == (merged or {"anyOf": branches})
    assert plain_schema({"anyOf": branches}) == {"anyOf": branches}


def test_closing_leaves_the_given_schema_and_data_alone() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "object", "properties": {"b": {}}}}},
    }
    closed = close_schema(schema)
    assert closed["required"] == ["a"]
    assert closed["properties"]["a"]["items"] == {
        "type": "object",
        "properties": {"b": {}},
        "additionalProperties": False,
        "required": ["b"],
    }
    assert "required" not in schema
