"""Rules of the fields that requests, lines of batches and calls of sessions have in common."""

import pytest
from pydantic import BaseModel, ValidationError

from toolcrew.contract.errors import ToolFailure
from toolcrew.contract.image_names import MAX_IMAGE_CHARS
from toolcrew.contract.schema import prepare_arguments
from toolcrew.orchestrator.api.runs import NewRun
from toolcrew.orchestrator.api.sessions import NewSession
from toolcrew.orchestrator.batches.line_shapes import EnvironmentFields, GraderFields
from toolcrew.workers.tools.session import SESSION_VERBS

OPEN = next(tool.spec for tool in SESSION_VERBS if tool.spec.name == "session.open")
SHAPES = {
    "image": (NewSession, NewRun, EnvironmentFields, GraderFields),
    "restore": (NewSession, NewRun, EnvironmentFields),
}


def is_accepted(shape: type[BaseModel], field: str, value: str) -> bool:
    try:
        shape.model_validate({field: value})
    except ValidationError as error:
        return not any(field in problem["loc"] for problem in error.errors())
    return True


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("image", "a" * MAX_IMAGE_CHARS, True),
        ("image", "a" * (MAX_IMAGE_CHARS + 1), False),
        ("image", "", False),
        ("restore", "A-_9" * 16, True),
        ("restore", "a" * 65, False),
        ("restore", "a/b", False),
        ("restore", "", False),
    ],
)
def test_a_field_has_the_same_rule_in_requests_lines_and_calls(field: str, value: str, accepted: bool) -> None:
    assert {shape.__name__: is_accepted(shape, field, value) for shape in SHAPES[field]} == {
        shape.__name__: accepted for shape in SHAPES[field]
    }
    try:
        prepare_arguments(OPEN, {field: value})
    except ToolFailure:
        assert not accepted
    else:
        assert accepted
