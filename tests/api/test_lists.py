"""Lists over HTTP: every list has pages, and the pages together have each item once."""

import httpx
import pytest

from tests.support.api.api_harness import ApiHarness
from toolcrew.orchestrator.api.app import _list_routers

ENDPOINT = {"base_url": "http://10.0.0.9:8000/v1", "model": "m"}
ITEMS = 3
LIMIT_OF_PAGES = 50
PATHS = (
    "/v1/runs",
    "/v1/batches",
    "/v1/secrets",
    "/v1/models",
    "/v1/tenants",
    "/v1/tenants/acme/keys",
    "/v1/audit",
)


async def add_items(admin: httpx.AsyncClient) -> None:
    for name in map(str, range(ITEMS)):
        for method, path, body in (
            ("POST", "/v1/runs", {"instruction": name}),
            ("PUT", f"/v1/secrets/TOKEN_{name}", {"value": "x" * 20}),
            ("PUT", f"/v1/models/model-{name}", ENDPOINT),
            ("POST", "/v1/tenants", {"name": f"more-{name}"}),
            ("POST", "/v1/tenants/acme/keys", {}),
        ):
            answer = await admin.request(method, path, json=body)
            assert answer.status_code < 300, answer.text
        lines = await admin.post("/v1/batches", content=f'{{"id": "{name}", "instruction": "act"}}\n')
        assert lines.status_code == 201, lines.text


@pytest.mark.parametrize("path", PATHS)
async def test_pages_of_one_item_have_all_items_of_the_list(api: ApiHarness, path: str) -> None:
    await add_items(api["admin"])
    whole = (await api["admin"].get(path, params={"limit": 200})).json()
    assert len(whole["data"]) >= ITEMS
    assert whole["next_cursor"] is None
    found, parameters = [], {"limit": "1"}
    for _ in range(LIMIT_OF_PAGES):
        page = (await api["admin"].get(path, params=parameters)).json()
        found += page["data"]
        if page["next_cursor"] is None:
            break
        parameters["cursor"] = page["next_cursor"]
    assert found == whole["data"]


def test_every_list_has_a_cursor_and_a_limit() -> None:
    """A list without pages would grow without a limit, or would omit items without a way to read them."""
    lists = [
        route
        for router in _list_routers()
        for route in router.routes
        if (model := getattr(route, "response_model", None)) is not None
        and getattr(model, "__name__", "").startswith(("Page[", "list"))
        and getattr(route, "methods", None) == {"GET"}
    ]
    assert len(lists) >= 13
    bounded = {"list_processes"}  # At most 96 processes of one sandbox, which it sends as one message.
    for route in lists:
        if route.name in bounded:
            continue
        names = {field.alias for field in route.dependant.query_params}  # type: ignore[attr-defined]
        assert names >= {"cursor", "limit"}, route
