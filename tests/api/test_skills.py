"""Skills over HTTP: every role sees the skills that the workers publish, and a tenant installs its own skills."""

from pathlib import Path

from tests.conftest import RedisProcess
from tests.support.api.api_harness import ApiHarness
from tests.support.records.builders import build_spec
from tests.support.records.skill_harness import write_skill
from toolcrew.contract.specs import Catalog
from toolcrew.orchestrator.sdk.skill_folders import examine_skill
from toolcrew.workers.skills.loader import load_skills


def publish(redis_server: RedisProcess, root: Path, *names: str) -> None:
    for name in names:
        write_skill(root, name)
    skills = tuple(skill.summary for skill in load_skills([root]))
    redis_server.publish_catalog(Catalog(tools=(build_spec("bash_tool"),), skills=skills))


async def test_skills_are_listed_in_pages_for_every_role(
    api: ApiHarness, redis_server: RedisProcess, tmp_path: Path
) -> None:
    publish(redis_server, tmp_path, "a", "b", "c")
    for role in ("acme", "operator", "admin"):
        first = (await api[role].get("/v1/skills", params={"limit": 2})).json()
        rest = (await api[role].get("/v1/skills", params={"cursor": first["next_cursor"]})).json()
        assert [skill["name"] for skill in (*first["data"], *rest["data"])] == ["a", "b", "c"]
        assert rest["next_cursor"] is None


async def test_a_tenant_installs_its_own_skills_and_no_other_tenant_sees_them(
    api: ApiHarness, redis_server: RedisProcess, tmp_path: Path
) -> None:
    publish(redis_server, tmp_path, "alpha", "beta")
    write_skill(tmp_path / "own", "beta", body="Ours.")
    examine_skill(tmp_path / "own" / "beta", as_zip=tmp_path / "beta.zip")
    packed = (tmp_path / "beta.zip").read_bytes()
    made = await api["acme"].post("/v1/skills", content=packed, headers={"Content-Type": "application/zip"})
    assert (made.status_code, made.json()["source"]) == (201, "tenant")
    for role, source, digest in (("acme", "tenant", made.json()["digest"]), ("rival", "system", None)):
        shown = (await api[role].get("/v1/skills/beta")).json()
        assert (shown["source"], shown["digest"] == made.json()["digest"]) == (source, digest is not None)
        assert [(one["name"], one["source"]) for one in (await api[role].get("/v1/skills")).json()["data"]] == [
            ("alpha", "system"),
            ("beta", source),
        ]
    again = await api["acme"].post("/v1/skills", content=packed)
    assert (again.status_code, "already has a skill beta" in again.json()["detail"]) == (422, True)
    assert (await api["acme"].post("/v1/skills", content=packed, params={"replace": "true"})).status_code == 201
    assert (await api["rival"].delete("/v1/skills/beta")).status_code == 404
    assert (await api["acme"].delete("/v1/skills/alpha")).status_code == 404
    assert (await api["acme"].delete("/v1/skills/beta")).status_code == 204
    assert (await api["acme"].get("/v1/skills/beta")).json()["source"] == "system"
