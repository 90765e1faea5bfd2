"""Model endpoints over HTTP: administrators set them, tenants see what they may use, and no response has a key."""

from tests.support.api.api_harness import ApiHarness

ENDPOINT = {
    "base_url": "http://10.0.0.9:8000/v1",
    "model": "m",
    "secret": "MODEL_KEY",
    "prompt_price": 1,
    "completion_price": 2,
}


async def test_administrators_set_endpoints_and_tenants_see_those_they_may_use(api: ApiHarness) -> None:
    for name in ("fast", "slow"):
        assert (await api["admin"].put(f"/v1/models/{name}", json=ENDPOINT)).status_code == 200
    own = await api["admin"].put("/v1/tenants/acme/models/own", json={**ENDPOINT, "fallback": "fast"})
    assert (own.status_code, own.json()["tenant"]) == (200, "acme")
    for key in ("operator", "acme"):
        assert (await api[key].put("/v1/models/fast", json=ENDPOINT)).status_code == 403
        assert (await api[key].delete("/v1/models/fast")).status_code == 403
    policy = (await api["operator"].get("/v1/tenants/acme")).json()["policy"]
    assert (await api["admin"].put("/v1/tenants/acme", json={**policy, "models": ["own", "fa*"]})).status_code == 200
    models = {key: (await api[key].get("/v1/models")).json()["data"] for key in ("operator", "acme", "rival")}
    assert {key: [row["name"] for row in rows] for key, rows in models.items()} == {
        "operator": ["fast", "own", "slow"],
        "acme": ["fast", "own"],
        "rival": ["fast", "slow"],
    }
    assert {row["base_url"] for row in models["operator"]} == {ENDPOINT["base_url"]}
    assert {(row["base_url"], row["secret"]) for row in (*models["acme"], *models["rival"])} == {(None, None)}
    refused = await api["acme"].post("/v1/runs", json={"instruction": "hi", "model": "slow"})
    assert (refused.status_code, refused.json()["code"]) == (403, "PERMISSION_DENIED")
    wrong = await api["admin"].put("/v1/models/fast", json={**ENDPOINT, "fallback": "nothing"})
    assert wrong.status_code == 422
    assert (await api["admin"].delete("/v1/models/fast")).status_code == 422
    assert (await api["admin"].delete("/v1/tenants/acme/models/own")).status_code == 204
    assert (await api["admin"].delete("/v1/models/fast")).status_code == 204
    assert (await api["admin"].delete("/v1/models/fast")).status_code == 404


async def test_a_batch_is_refused_for_a_model_its_tenant_may_not_use(api: ApiHarness) -> None:
    free = {"base_url": ENDPOINT["base_url"], "model": "m"}
    assert (await api["admin"].put("/v1/models/fast", json=free)).status_code == 200
    policy = (await api["operator"].get("/v1/tenants/acme")).json()["policy"]
    await api["admin"].put("/v1/tenants/acme", json={**policy, "models": ["fast"]})
    lines = {
        name: f'{{"id": "a", "instruction": "act", "model": "{name}", "tools": []}}\n' for name in ("fast", "slow")
    }
    answers = {name: await api["acme"].post("/v1/batches", content=text) for name, text in lines.items()}
    assert {name: answer.status_code for name, answer in answers.items()} == {"fast": 201, "slow": 403}
    costly = '{"id": "a", "instruction": "act", "model": "fast", "limits": {"max_cost": 1}}\n'
    assert (await api["acme"].post("/v1/batches", content=costly)).status_code == 422
    assert (await api["admin"].put("/v1/models/fast", json=ENDPOINT)).status_code == 200
    assert (await api["acme"].post("/v1/batches", content=costly)).status_code == 201


async def test_a_model_that_does_not_exist_is_refused_with_the_names_that_do(api: ApiHarness) -> None:
    for name in ("fast", "slow"):
        assert (await api["admin"].put(f"/v1/models/{name}", json=ENDPOINT)).status_code == 200
    assert (await api["admin"].put("/v1/tenants/rival/models/fastest", json=ENDPOINT)).status_code == 200
    answer = await api["acme"].post("/v1/runs", json={"instruction": "hi", "model": "fats"})
    problem = answer.json()
    assert (answer.status_code, problem["code"], problem["nearest"]) == (422, "INVALID_ARGUMENTS", ["fast", "slow"])
    assert "GET /v1/models" in problem["detail"]
    assert not any(name in problem["detail"] for name in ("OPENAI", "--model", "TOOLCREW"))
    assert (await api["acme"].get("/v1/runs")).json()["data"] == []
    for name in ("fast", "scripted"):
        accepted = await api["acme"].post("/v1/runs", json={"instruction": "hi", "model": name})
        assert accepted.status_code == 202, accepted.text


async def test_a_batch_with_a_model_that_does_not_exist_is_refused_with_its_lines(api: ApiHarness) -> None:
    assert (await api["admin"].put("/v1/models/fast", json=ENDPOINT)).status_code == 200
    line = '{{"id": "{}", "instruction": "act", "model": "{}", "tools": []}}\n'
    lines = line.format("a", "fast") + line.format("b", "fats") + line.format("c", "nope") + line.format("d", "local")
    answer = await api["acme"].post("/v1/batches", content=lines)
    detail = answer.json()["detail"]
    assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_ARGUMENTS")
    assert [number for number in range(1, 5) if f"line {number}: " in detail] == [2, 3, 4]
    assert "GET /v1/models" in detail
    by_default = await api["acme"].post("/v1/batches?model=fats", content='{"id": "a", "instruction": "act"}\n')
    assert (by_default.status_code, by_default.json()["code"]) == (422, "INVALID_ARGUMENTS")
