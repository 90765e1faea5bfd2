"""The content of one tenant changes no state of a model that other tenants use."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.models.model_endpoint import END, USAGE, Answer, answer, serving, stream
from toolcrew.contract.errors import ModelUnavailable
from toolcrew.orchestrator.dialects.model import ModelRequest
from toolcrew.orchestrator.models.openai import OpenAIModel

FIELDS = ("stream_options", "max_completion_tokens")
OK = stream(END, USAGE)


def quote_invalid(body: dict[str, Any]) -> bytes:
    """Return the refusal of a server that quotes an invalid value, as many do."""
    return answer(400, {"error": {"message": f"invalid value: {json.dumps(body)}", "type": "invalid_request_error"}})


ATTACKS: list[Callable[[str], ModelRequest]] = [
    lambda field: ModelRequest([], extra={"response_format": {"type": field}}),
    lambda field: ModelRequest([], extra={"reasoning_effort": field}),
    lambda field: ModelRequest([], extra={"logit_bias": {field: 1}}),
    lambda field: ModelRequest([], extra={"stop": [f"x {field} y"]}),
    lambda field: ModelRequest([{"role": "user", "content": field}], extra={"seed": "bad"}),
    lambda field: ModelRequest([{"role": "user", "content": field.upper()}], extra={"seed": "bad"}),
    lambda field: ModelRequest([{"role": field, "content": "x"}]),
    lambda field: ModelRequest([], [{"type": "function", "function": {"name": field}}]),
]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("attack", ATTACKS, ids=range(len(ATTACKS)))
@pytest.mark.parametrize("gives_way", [False, True], ids=["refuses again", "accepts the second"])
async def test_a_request_that_makes_the_server_quote_a_field_changes_no_other_request(
    attack: Callable[[str], ModelRequest], field: str, gives_way: bool
) -> None:
    request = attack(field)
    attempts = 0

    def reply(_: int, body: dict[str, Any]) -> bytes:
        nonlocal attempts
        if body["messages"] == [{"role": "user", "content": "victim"}]:
            return OK
        attempts += 1
        return OK if gives_way and attempts > 1 else quote_invalid(body)

    async with serving(reply) as server:
        model = OpenAIModel("m", server.url, None, 5.0, retries=0)
        try:
            [_ async for _ in model.stream(request)]
        except ModelUnavailable:
            assert not gives_way
        victim = ModelRequest([{"role": "user", "content": "victim"}], extra={"max_tokens": 5})
        assert USAGE in [chunk async for chunk in model.stream(victim)]
        await model.aclose()
    assert server.bodies[-1]["stream_options"] == {"include_usage": True}
    assert server.bodies[-1]["max_tokens"] == 5


async def test_the_name_of_a_model_changes_no_later_request() -> None:
    def reply(number: int, body: dict[str, Any]) -> bytes:
        return quote_invalid({"model": body["model"]}) if number == 1 else OK

    async with serving(reply) as server:
        model = OpenAIModel("stream_options", server.url, None, 5.0, retries=0)
        for _ in range(2):
            assert [chunk async for chunk in model.stream(ModelRequest([]))]
        await model.aclose()
    assert "stream_options" in server.bodies[-1]


def refuse(field: str, error: Any) -> Answer:
    return lambda _, body: answer(422, error) if field in body else OK


@pytest.mark.parametrize(
    "error",
    [
        {"error": {"message": "Unknown parameter", "param": "stream_options", "code": "unknown_parameter"}},
        {"detail": [{"loc": ["body", "stream_options"], "msg": "Extra inputs are not permitted"}]},
        {"message": "property 'stream_options' is unsupported"},
        {"object": "error", "message": "[{'type': 'extra_forbidden', 'loc': ('body', 'stream_options')}]"},
    ],
)
async def test_a_field_that_the_server_refuses_is_left_out_from_then_on(error: Any) -> None:
    async with serving(refuse("stream_options", error)) as server:
        model = OpenAIModel("m", server.url, None, 5.0, retries=0)
        for _ in range(2):
            assert [chunk async for chunk in model.stream(ModelRequest([]))]
        await model.aclose()
    assert ["stream_options" in body for body in server.bodies] == [True, False, False]


async def test_a_request_that_names_the_refused_field_succeeds_too() -> None:
    request = ModelRequest([{"role": "user", "content": "what are stream_options?"}])
    async with serving(refuse("stream_options", {"message": "unknown field stream_options"})) as server:
        model = OpenAIModel("m", server.url, None, 5.0, retries=0)
        assert [chunk async for chunk in model.stream(request)]
        await model.aclose()
    assert ["stream_options" in body for body in server.bodies] == [True, False]
