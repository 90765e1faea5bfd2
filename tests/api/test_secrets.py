"""Secrets over HTTP: a tenant sets, lists and revokes its own; no response contains a value."""

from tests.api_ground import ApiGround

VALUE = "ghp-canary-value-1234"


async def test_a_tenant_sets_lists_and_revokes_its_own_secrets(api: ApiGround) -> None:
    body = {"value": VALUE, "hosts": ["api.example"], "place": "basic"}
    made = await api["acme"].put("/v1/secrets/TOKEN", json=body)
    listed = await api["acme"].get("/v1/secrets")
    assert (made.status_code, listed.json()["data"]) == (200, [made.json()])
    assert (made.json()["hosts"], made.json()["place"], made.json()["revision"]) == (["api.example"], "basic", 1)
    assert (await api["operator"].get("/v1/secrets", params={"tenant": "acme"})).json()["data"] == [made.json()]
    assert (await api["rival"].get("/v1/secrets")).json()["data"] == []
    assert (await api["rival"].delete("/v1/secrets/TOKEN")).status_code == 404
    refused = await api["acme"].put("/v1/secrets/TOKEN", json={"value": VALUE + "\n"})
    wrong = await api["acme"].put("/v1/secrets/TOKEN", json={"value": [VALUE]})
    assert (refused.status_code, wrong.status_code) == (422, 422)
    assert (await api["acme"].delete("/v1/secrets/TOKEN")).status_code == 204
    assert (await api["acme"].get("/v1/secrets")).json()["data"] == []
    for response in (made, listed, refused, wrong):
        assert VALUE not in response.text
