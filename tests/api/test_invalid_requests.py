"""Invalid bodies and parameters at every address: our own sentences, the field, and the nearest name."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel

from tests.support.api.api_harness import ApiHarness
from toolcrew.orchestrator.api.app import _list_routers

PYDANTIC = ("Input should", "Value error", "Extra inputs", "Field required", "String should", "Assertion failed")
VALUES: tuple[Any, ...] = ({"deep": [1]}, [[]], "\0 no name", -1, 1e300, None, True)


def list_routes() -> Iterator[tuple[str, str, APIRoute]]:
    for router in _list_routers():
        for route in router.routes:
            if isinstance(route, APIRoute) and route.path.startswith("/v1/"):
                for method in sorted(route.methods):
                    yield method, route.path.replace("{", "").replace("}", "").replace(":path", ""), route


def find_body(route: APIRoute) -> type[BaseModel] | None:
    kind = route.body_field.field_info.annotation if route.body_field is not None else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def assert_own_words(text: str) -> None:
    assert not any(sentence in text for sentence in PYDANTIC), text


async def test_no_body_gets_a_sentence_of_pydantic(api: ApiHarness) -> None:
    checked = 0
    for method, path, route in list_routes():
        kind = find_body(route)
        if kind is None:
            continue
        bodies: list[Any] = [{}, [], "x", {"no_field_has_this_name": 1}]
        bodies += [{name: value} for name in kind.model_fields for value in VALUES]
        for body in bodies:
            answer = await api["admin"].request(method, path, json=body)
            assert answer.status_code in (200, 201, 202, 404, 422, 503), (path, body, answer.text)
            assert_own_words(answer.text)
            checked += answer.status_code == 422
    assert checked > 400


async def test_no_parameter_gets_a_sentence_of_pydantic(api: ApiHarness) -> None:
    for method, path, route in list_routes():
        names = {field.alias for dependency in route.dependant.dependencies for field in dependency.query_params}
        names |= {field.alias for field in route.dependant.query_params}
        for name in names:
            for value in ("\0", "-1", "x" * 600):
                answer = await api["admin"].request(method, path, params={name: value})
                assert_own_words(answer.text)


@pytest.mark.parametrize(
    ("path", "body", "detail", "nearest"),
    [
        (
            "/v1/runs",
            {"instruction": "x", "tolls": []},
            "`body.tolls` is an unknown field: did you mean `tools`?",
            "tools",
        ),
        ("/v1/runs", {"prompt": "x"}, "`body.instruction` is missing: add it", None),
        ("/v1/runs", {"instruction": "x", "dialect": "tag"}, "`body.dialect` must be 'native', 'tags'", "tags"),
        ("/v1/runs", {"instruction": "x", "max_iterations": 0}, "`body.max_iterations` must be at least 1", None),
        (
            "/v1/runs",
            {"instruction": "x", "webhook": {"url": "http://a.example/", "secret": "no"}},
            "`body.webhook.secret`: ",
            None,
        ),
        ("/v1/sessions", {"netwrok": "none"}, "`body.netwrok` is an unknown field: did you mean `network`?", "network"),
        ("/v1/sessions/s/calls", {"name": "t", "args": {}}, "did you mean `arguments`?", "arguments"),
        ("/v1/tenants", {"name": "a b"}, "`body.name` must ", None),
    ],
)
async def test_an_invalid_field_is_named_with_what_to_write(
    api: ApiHarness, path: str, body: Any, detail: str, nearest: str | None
) -> None:
    answer = await api["admin"].post(path, json=body)
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (422, "INVALID_ARGUMENTS")
    assert detail in problem["detail"]
    assert problem["nearest"][:1] == ([nearest] if nearest is not None else [])


async def test_json_without_its_content_type_is_explained(api: ApiHarness) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = await api["admin"].post("/v1/runs", content='{"instruction": "x"}', headers=form)
    assert answer.status_code == 422
    assert "Content-Type: application/json" in answer.json()["detail"]
