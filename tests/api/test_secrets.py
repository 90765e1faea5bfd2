"""Secrets over HTTP: a tenant sets, lists and revokes its own; no response contains a value."""

import re

from tests.api.test_identities import open_login
from tests.support.api.api_harness import ApiHarness

VALUE = "ghp-canary-value-1234"


async def test_a_tenant_sets_lists_and_revokes_its_own_secrets(api: ApiHarness) -> None:
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


async def test_the_secrets_page_sets_and_revokes_secrets_and_never_shows_a_value(api: ApiHarness) -> None:
    form = {"name": "TOKEN", "value": VALUE, "hosts": "api.example, git.example:8443", "place": "basic"}
    async with open_login(api, "acme") as client:
        empty = await client.get("/secrets")
        [token] = set(re.findall(r'name="form_token" value="([0-9a-f]{64})"', empty.text))
        assert (await client.post("/secrets", data=form)).status_code == 403
        stored = await client.post("/secrets", data={**form, "form_token": token}, follow_redirects=True)
        invalid = await client.post("/secrets", data={**form, "hosts": "*", "form_token": token})
        foreign = await client.post("/secrets?of=rival", data={**form, "form_token": token})
        assert "git.example:8443" in stored.text
        assert (invalid.status_code, foreign.status_code) == (422, 403)
        revoked = await client.post("/secrets/TOKEN/revoke", data={"form_token": token}, follow_redirects=True)
        assert "No secret is stored" in revoked.text
        for response in (stored, invalid, foreign, revoked):
            assert VALUE not in response.text
    async with open_login(api, "admin") as client:
        assert "Secrets of tenant rival" in (await client.get("/secrets?tenant=rival")).text
