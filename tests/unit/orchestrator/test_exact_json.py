"""JSON as the API sends it, for values that JSON cannot represent."""

import json
from typing import Any

import pytest

from toolcrew.orchestrator.api.exact_json import dump_exactly


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"a": float("nan"), "b": [float("inf"), 1.5]}, {"a": None, "b": [None, 1.5]}),
        ({"a": ("\ud800", float("-inf"))}, {"a": ["\ud800", None]}),
        ({"a": "é\u202e"}, {"a": "é\u202e"}),
    ],
)
def test_any_content_is_encoded_as_standard_json(content: Any, expected: Any) -> None:
    def reject_constant(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(dump_exactly(content), parse_constant=reject_constant) == expected
