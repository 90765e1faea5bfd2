"""Loading skills: required parts of a folder, warnings, and one broken skill that does not affect the others."""

import contextlib
import os
import tarfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from contract import skills as rules
from contract.errors import ConfigError, ErrorCode, ToolFailure
from contract.skill_sidecars import SIDECAR_FILE
from contract.skills import MAX_ARCHIVE_BYTES, MAX_BUNDLE_BYTES, MAX_BUNDLE_FILES, SkillBroken, parse_skill
from orchestrator.sdk.skill_folders import examine_skill
from tests.skill_harness import write_skill
from workers.skills.loader import load_skill, load_skills, pack_skill

LINE = st.text(st.characters(blacklist_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=80).filter(str.strip)

TAGS = (
    "int",
    "float",
    "bool",
    "timestamp",
    "binary",
    "set",
    "omap",
    "pairs",
    "null",
    "merge",
    "value",
    "python/name:os.system",
)
YAML_WORDS = (
    *"-:?[]{},#&*!|>'\"%@`ab1\n \t",
    "name: a\n",
    "description: b\n",
    "\n- ",
    ": ",
    "<<: ",
    "&a ",
    "*a ",
    *(f"!!{tag} " for tag in TAGS),
)


def front(**fields: object) -> str:
    return yaml.safe_dump({"name": "a", "description": "Does a.", **fields}, allow_unicode=True, sort_keys=False)


def parse(matter: str) -> rules.SkillText:
    return parse_skill(f"---\n{matter}\n---\nbody", "a")


def warnings_of(matter: str) -> str:
    return "\n".join(parse(matter).warnings)


def test_a_skill_is_its_front_matter_its_text_and_its_files(tmp_path: Path) -> None:
    matter = (
        "name: pdf-forms\ndescription: Fills forms.\nlicense: MIT\ncompatibility: needs python\nallowed-tools: [Read]\n"
        "metadata: {a: b}"
    )
    skill = load_skill(
        write_skill(
            tmp_path, "pdf-forms", matter, "# Forms", {"scripts/run.py": "#!/usr/bin/env python3\n", "a/b.md": "b"}
        )
    )
    assert skill.body == "# Forms"
    assert [file.path for file in skill.files] == ["SKILL.md", "a/b.md", "scripts/run.py"]
    summary = skill.summary
    assert summary.name == "pdf-forms"
    assert summary.description == "Fills forms."
    assert summary.license == "MIT"
    assert summary.compatibility == "needs python"
    assert (summary.files, summary.has_scripts, summary.warnings) == (3, True, ())
    assert summary.bytes == sum(file.size for file in skill.files)


@pytest.mark.parametrize(
    ("matter", "message"),
    [
        (front(description="x" * 1068), "description has 1068 characters, the standard allows 1024"),
        (front(description="x" * 5000), "it was cut at 4096"),
        (front(name="other"), "differs from the folder's"),
        (front(name="A--b"), "lower-case letters"),
        (front(version="1"), "not in the standard are ignored: version"),
        (front(name=7), "was read as '7'"),
        (front(license=["a"]), "license is not text"),
        ("name: a\ndescription: Use it: often, and well", "put the value with the colon into quotes"),
    ],
)
def test_non_standard_skills_load_with_a_warning(matter: str, message: str) -> None:
    assert message in warnings_of(matter)


def test_an_unquoted_colon_is_read_as_it_was_meant() -> None:
    text = parse("name: a\ndescription: Use it: often,\n  and well\nlicense: 'MIT'")
    assert (text.description, text.license) == ("Use it: often, and well", "MIT")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("# only text", "no front matter"),
        ("", "no front matter"),
        ("---\nname: a\ndescription: b\n", "has no end"),
        ("---\ndescription: b\n---\n", "has no name"),
        ("---\nname: a\n---\n", "has no description"),
        ("---\nname: a\ndescription: ''\n---\n", "has no description"),
        ("---\nname: ../a\ndescription: b\n---\n", "cannot be used"),
        ("---\nname: a\ndescription: [b\n---\n", "not valid YAML"),
        ("---\n- a\n---\n", "not a list of"),
        ("---\nname: a\ndescription: " + "[" * 5000 + "\n---\n", "nested too deeply"),
        ("---\nname: a\ndescription: " + "x" * 70_000 + "\n---\n", "longer than 16384"),
        ("---\nname: !!python/object/apply:os.system [id]\ndescription: b\n---\n", "has a tag"),
        ("---\nname: &a x\ndescription: *a\n---\n", "anchors or aliases"),
        ("---\nname: a\n<<: {description: b}\n---\n", "merge key"),
        ("---\nname: a\ndescription: b\nx: [" + "1," * 3000 + "]\n---\n", "too many values"),
    ],
)
def test_unusable_skills_are_refused_with_advice(source: str, message: str) -> None:
    with pytest.raises(SkillBroken, match=message.replace("[", r"\[")):
        parse_skill(source, "a")


@given(st.one_of(st.text(max_size=400), st.lists(st.sampled_from(YAML_WORDS), max_size=30).map("".join)))
def test_no_front_matter_does_anything_but_parse_or_be_refused(matter: str) -> None:
    with contextlib.suppress(SkillBroken):
        text = parse(matter)
        assert text.name
        assert text.description


@given(LINE, LINE)
def test_text_that_yaml_writes_is_read_back(description: str, compatibility: str) -> None:
    text = parse(front(description=description, compatibility=compatibility))
    assert (text.description, text.compatibility) == (" ".join(description.split()), " ".join(compatibility.split()))


def test_a_broken_skill_is_logged_and_others_load(tmp_path: Path) -> None:
    write_skill(tmp_path, "a", "name: a")
    write_skill(tmp_path, "b")
    (tmp_path / "notes").mkdir()
    (write_skill(tmp_path, "c") / "SKILL.md").write_bytes(b"---\nname: \xff\n---\n")
    with capture_logs() as logs:
        assert [skill.name for skill in load_skills([tmp_path])] == ["b"]
    assert [(log["event"], Path(log["folder"]).name) for log in logs] == [
        ("skill_not_loaded", "a"),
        ("skill_not_loaded", "c"),
    ]


def test_the_first_root_wins_for_a_name(tmp_path: Path) -> None:
    first, second = write_skill(tmp_path / "1", "a"), write_skill(tmp_path / "2", "a", body="other")
    with capture_logs() as logs:
        [skill] = load_skills([tmp_path / "1", tmp_path / "2"])
    assert str(skill.source) == str(first)
    assert [(log["event"], log["folder"]) for log in logs] == [("skill_shadowed", str(second))]


def test_a_root_that_is_not_there_is_an_error_of_the_operator(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TOOLCREW_SKILLS"):
        load_skills([tmp_path / "none"])


def test_a_link_that_leads_out_is_refused_and_one_inside_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    inside = write_skill(tmp_path, "a", files={"b.md": "b"})
    (inside / "c.md").symlink_to("b.md")
    (inside / "all").symlink_to(".")
    assert [file.path for file in load_skill(inside).files] == ["SKILL.md", "b.md", "c.md"]
    (inside / "d.md").symlink_to("../secret")
    for load in (load_skill, examine_skill):
        with pytest.raises(SkillBroken, match="leads out"):
            load(inside)


def test_folders_may_be_nested_as_deep_as_anybody_needs(tmp_path: Path) -> None:
    folder = write_skill(tmp_path, "a")
    deep = folder.joinpath(*["d"] * 32)
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    assert len(load_skill(folder).files) == 2
    for _ in range(40):
        deep = deep / ("d" * 20)
        deep.mkdir()
    for load in (load_skill, examine_skill):
        with pytest.raises(SkillBroken, match="nested more than 32 deep"):
            load(folder)


def test_a_sidecar_that_is_broken_is_a_warning_and_the_skill_is_one(tmp_path: Path) -> None:
    fine = write_skill(tmp_path, "a", files={"scripts/a.py": "1", SIDECAR_FILE: '{"entrypoint": "scripts/a.py"}'})
    broken = write_skill(tmp_path, "b", files={SIDECAR_FILE: '{"entrypoint": "scripts/a.py"}'})
    tool = load_skill(fine).tool
    assert tool is not None
    assert (tool.spec.name, load_skill(fine).summary.warnings) == ("a", ())
    assert load_skill(broken).tool is None
    (warning,) = examine_skill(broken).skill.warnings
    assert warning.startswith("its skill.tool.json is not used")


def test_too_many_or_too_large_files_are_refused(tmp_path: Path) -> None:
    many = write_skill(tmp_path, "many", files={f"f{number}": "" for number in range(rules.MAX_BUNDLE_FILES)})
    large = write_skill(tmp_path, "large")
    with open(large / "data", "wb") as file:
        file.truncate(rules.MAX_BUNDLE_BYTES + 1)
    for load in (load_skill, examine_skill):
        with pytest.raises(SkillBroken, match="more than 2000 files"):
            load(many)
        with pytest.raises(SkillBroken, match="larger than 64 MiB"):
            load(large)


def test_a_missing_run_bit_is_warned_of(tmp_path: Path) -> None:
    folder = write_skill(tmp_path, "a", files={"scripts/a.py": "#!/bin/sh\n", "scripts/b.py": "import a\n"})
    (folder / "scripts" / "a.py").chmod(0o644)
    (folder / "scripts" / "b.py").chmod(0o644)
    expected = "scripts/a.py begins with #! and has no run bit: chmod +x it"
    assert load_skill(folder).summary.warnings == (expected,)
    assert examine_skill(folder).skill.warnings == (expected,)


def test_the_digest_reports_names_run_bits_and_bytes_apart(tmp_path: Path) -> None:
    def digest(place: str, files: dict[str, str | bytes]) -> str:
        return load_skill(write_skill(tmp_path / place, "a", files=files)).summary.digest

    base = digest("1", {"b": "c", "d": ""})
    assert digest("2", {"b": "c", "d": ""}) == base
    assert (
        len(
            {base, digest("3", {"b": "", "d": "c"}), digest("4", {"bc": "", "d": ""}), digest("5", {"b": "c", "e": ""})}
        )
        == 4
    )
    os.chmod(tmp_path / "2" / "a" / "b", 0o755)
    assert load_skill(tmp_path / "2" / "a").summary.digest != base


def test_files_that_have_changed_are_not_packed(tmp_path: Path) -> None:
    folder = write_skill(tmp_path, "a", files={"b": "c"})
    skill = load_skill(folder)
    with pack_skill(skill) as first, pack_skill(skill) as second:
        assert len(data := first.read()) > 1024
        assert second.read() == data
    for change in (lambda: (folder / "b").write_text("d"), lambda: (folder / "b").unlink()):
        change()
        with pytest.raises(ToolFailure) as refused:
            pack_skill(skill)
        assert refused.value.code is ErrorCode.STALE_FILE


def test_a_bundle_with_the_longest_names_is_no_larger_an_archive_than_is_taken(tmp_path: Path) -> None:
    deep = "/".join(["d" * 250] * 15)
    folder = write_skill(tmp_path, "a", files={f"{deep}/{number:0250}": b"" for number in range(50)})
    skill = load_skill(folder)
    with pack_skill(skill) as packed:
        size = packed.seek(0, os.SEEK_END) - 2 * tarfile.RECORDSIZE
    assert (size - skill.summary.bytes) / len(skill.files) < (MAX_ARCHIVE_BYTES - MAX_BUNDLE_BYTES) / MAX_BUNDLE_FILES
