"""Skills over HTTP: every role is shown what the workers publish."""

from pathlib import Path

from contract.names import catalog_key
from contract.specs import Catalog
from tests.api_ground import ApiGround
from tests.builders import build_spec
from tests.conftest import RedisProcess
from tests.skill_ground import write_skill
from workers.skills.loader import load_skills


def publish(redis_server: RedisProcess, root: Path, *names: str) -> None:
    for name in names:
        write_skill(root, name)
    skills = tuple(skill.summary for skill in load_skills([root]))
    with redis_server.client() as client:
        client.set(catalog_key("default", "sandbox"), Catalog(tools=(build_spec("bash_tool"),), skills=skills).model_dump_json())


async def test_skills_come_in_pages_to_tenants_and_operators(api: ApiGround, redis_server: RedisProcess, tmp_path: Path) -> None:
    publish(redis_server, tmp_path, "a", "b", "c")
    for role in ("acme", "operator", "admin"):
        first = (await api[role].get("/v1/skills", params={"limit": 2})).json()
        rest = (await api[role].get("/v1/skills", params={"cursor": first["next_cursor"]})).json()
        assert [skill["name"] for skill in (*first["data"], *rest["data"])] == ["a", "b", "c"]
        assert rest["next_cursor"] is None


async def test_one_skill_is_shown_and_one_that_is_none_is_not_found(api: ApiGround, redis_server: RedisProcess, tmp_path: Path) -> None:
    publish(redis_server, tmp_path, "alpha")
    shown = (await api["acme"].get("/v1/skills/alpha")).json()
    assert (shown["description"], shown["files"], shown["has_scripts"], shown["warnings"]) == ("Does alpha.", 1, False, [])
    missing = await api["acme"].get("/v1/skills/alfa")
    assert (missing.status_code, missing.json()["code"]) == (404, "FILE_NOT_FOUND")


async def test_nobody_without_a_key_is_shown_skills(api: ApiGround) -> None:
    async with api.client("none") as client:
        assert (await client.get("/v1/skills")).status_code == 401
