"""Access rights of keys, roles and tenants. A refusal must not reveal what other tenants have."""

import httpx
import pytest

from tests.support.api.api_harness import ApiHarness

OPERATORS_ONLY = [
    ("GET", "/v1/hosts"),
    ("GET", "/v1/pressure"),
    ("GET", "/v1/tenants"),
    ("GET", "/v1/audit"),
    ("PATCH", "/v1/tools/bash_tool"),
]
ADMINS_ONLY = [
    ("POST", "/v1/tenants"),
    ("PUT", "/v1/tenants/acme"),
    ("DELETE", "/v1/tenants/acme"),
    ("GET", "/v1/tenants/acme/keys"),
    ("POST", "/v1/tenants/acme/keys"),
]
BODIES = {"PATCH": {"enabled": False}, "POST": {"name": "other"}, "PUT": {}}


def problem(response: httpx.Response) -> dict[str, object]:
    assert response.headers["content-type"] == "application/problem+json"
    reply: dict[str, object] = response.json()
    assert reply["status"] == response.status_code
    assert reply["detail"]
    return reply


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer x",
        "Basic dXNlcjpwYXNz",
        "Bearer tc_0000000000000000_" + "A" * 43,
        "Bearer " + "x" * 5000,
    ],
)
async def test_a_request_without_a_valid_key_is_answered_401(api: ApiHarness, header: str | None) -> None:
    headers = {"Authorization": header} if header is not None else {}
    response = await api.anonymous.get("/v1/tools", headers=headers)
    assert (response.status_code, problem(response)["code"]) == (401, "UNAUTHENTICATED")
    assert response.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize(
    ("role", "method", "path"),
    [
        *(("acme", *route) for route in (*OPERATORS_ONLY, *ADMINS_ONLY)),
        *(("operator", *route) for route in ADMINS_ONLY),
    ],
)
async def test_a_key_is_refused_on_routes_of_a_higher_role(api: ApiHarness, role: str, method: str, path: str) -> None:
    response = await api[role].request(method, path, json=BODIES.get(method))
    assert (response.status_code, problem(response)["code"]) == (403, "PERMISSION_DENIED")


async def test_a_tenant_key_gets_the_same_refusal_for_existing_and_unknown_tenants(api: ApiHarness) -> None:
    answers = [
        problem(await api["acme"].get("/v1/batches", params={"tenant": name})) for name in ("rival", "no-such-tenant")
    ]
    assert answers[0] == answers[1]
    assert answers[0]["code"] == "PERMISSION_DENIED"


async def test_a_revoked_key_is_refused(api: ApiHarness) -> None:
    made = (await api["admin"].post("/v1/tenants/acme/keys", json={"name": "short-lived"})).json()
    async with api.client(made["key"]) as client:
        assert (await client.get("/v1/batches")).status_code == 200
        assert (await api["admin"].delete(f"/v1/tenants/acme/keys/{made['id']}")).status_code == 204
        assert (await client.get("/v1/batches")).status_code == 401


async def test_a_key_is_returned_once_and_never_listed(api: ApiHarness) -> None:
    made = (await api["admin"].post("/v1/tenants/acme/keys", json={"name": "n"})).json()
    listed = await api["admin"].get("/v1/tenants/acme/keys")
    assert made["id"] in listed.text
    assert made["key"] not in listed.text


async def test_a_key_is_not_revoked_under_the_name_of_another_tenant(api: ApiHarness) -> None:
    made = (await api["admin"].post("/v1/tenants/rival/keys", json={})).json()
    assert (await api["admin"].delete(f"/v1/tenants/acme/keys/{made['id']}")).status_code == 404
    async with api.client(made["key"]) as client:
        assert (await client.get("/v1/batches")).status_code == 200


async def test_tenant_changes_are_audited_with_the_key_that_made_them(api: ApiHarness) -> None:
    assert (await api["admin"].post("/v1/tenants", json={"name": "fresh", "policy": {"weight": 2}})).status_code == 201
    assert (await api["admin"].delete("/v1/tenants/fresh")).status_code == 200
    entries = (await api["operator"].get("/v1/audit", params={"about": "fresh"})).json()["data"]
    assert [(entry["action"], entry["actor"]["name"]) for entry in entries] == [
        ("tenant.remove", "admin"),
        ("tenant.add", "admin"),
    ]
