"""`toolcrew skills`: the list of the pool's skills and the check of a skill folder, for people and for programs."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.conftest import RedisProcess
from tests.support.records.builders import build_spec
from tests.support.records.skill_harness import SHIPPED, write_skill
from toolcrew.contract.specs import Catalog
from toolcrew.orchestrator.command import app
from toolcrew.workers.skills.loader import load_skills


def toolcrew(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["skills", *arguments])


@pytest.fixture
def pool(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A pool that publishes a tool and two skills."""
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    write_skill(tmp_path, "beta", 'name: beta\ndescription: "Does \\e[2J beta."\nlicense: MIT\nextra: x')
    write_skill(tmp_path, "alpha", files={"scripts/a.py": "1"})
    skills = tuple(skill.summary for skill in load_skills([tmp_path]))
    redis_server.publish_catalog(Catalog(tools=(build_spec("echo"),), skills=skills))


@pytest.mark.usefixtures("pool")
def test_a_skill_is_checked_installed_listed_replaced_and_removed(tmp_path: Path) -> None:
    folder = write_skill(tmp_path / "own", "beta", files={"scripts/a.py": "1"})
    packed = shutil.make_archive(str(tmp_path / "beta"), "zip", tmp_path / "own", "beta")
    assert toolcrew("install", packed, "--check").stdout == "beta is a valid skill\n"
    assert "beta" not in {
        row["name"] for row in json.loads(toolcrew("list", "--json").stdout)["skills"] if row["source"] == "tenant"
    }

    installed = json.loads(toolcrew("install", packed, "--json").stdout)["skill"]
    rows = {row["name"]: row for row in json.loads(toolcrew("list", "--json").stdout)["skills"]}
    assert {name: row["source"] for name, row in rows.items()} == {"alpha": "system", "beta": "tenant"}
    assert rows["beta"]["digest"] == installed["digest"]
    repeated = toolcrew("install", str(folder))
    assert (repeated.exit_code, "already has a skill beta: replace it (--replace)" in repeated.stderr) == (1, True)
    (folder / "more").write_text("x")
    assert toolcrew("install", str(folder), "--replace").stdout.startswith("beta is installed (3 files, digest ")
    assert "source" not in toolcrew("list", "beta").stdout

    assert toolcrew("remove", "beta").stdout == "beta is removed\n"
    assert [row["source"] for row in json.loads(toolcrew("list", "--json").stdout)["skills"]] == ["system", "system"]
    missing = toolcrew("remove", "beta")
    assert (missing.exit_code, "has no installed skill beta" in missing.stderr) == (1, True)


@pytest.mark.usefixtures("pool")
def test_list_with_a_name_prints_one_skill_escaped() -> None:
    text = toolcrew("list", "beta").stdout
    assert text.startswith("beta\n\nDoes \\x1b[2J beta.\n\n1 file, ")
    assert "license: MIT\n" in text
    assert text.endswith("warning: keys that are not in the standard are ignored: extra\n")
    assert [row["license"] for row in json.loads(toolcrew("list", "beta", "--json").stdout)["skills"]] == ["MIT"]


def test_a_check_imports_no_modules_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_skill(tmp_path, "a")
    for package in ("toolcrew", "workers", "json"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path)
    assert toolcrew("install", "--check", "a").exit_code == 0


def test_a_check_reports_errors_and_warnings(tmp_path: Path) -> None:
    extra = str(write_skill(tmp_path, "a", "name: a\ndescription: b\nextra: x"))
    broken = str(write_skill(tmp_path, "b", "name: b"))
    fine = str(SHIPPED / "word-count")
    assert [toolcrew("install", "--check", one).exit_code for one in (fine, extra, broken, str(tmp_path))] == [
        0,
        0,
        1,
        1,
    ]
    assert (
        "warning: keys that are not in the standard are ignored: extra\na is a valid skill"
        in toolcrew("install", "--check", extra).stdout
    )
    assert "has no description" in toolcrew("install", "--check", broken).stderr
    assert json.loads(toolcrew("install", "--check", extra, "--json").stdout)["warnings"]


@pytest.mark.usefixtures("pool")
def test_an_unknown_skill_is_reported_with_the_nearest_names() -> None:
    result = toolcrew("list", "alfa")
    assert (result.exit_code, "Skill not found: alfa; similar names: alpha" in result.stderr) == (1, True)
