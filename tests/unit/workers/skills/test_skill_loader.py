"""Loading skills: required parts of a folder, sidecars, warnings, and the limits of a host's store."""

import contextlib
import json
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.support.records.skill_harness import write_skill
from tests.support.sandboxd.fake_engine import FakeEngine
from toolcrew.contract import skills as rules
from toolcrew.contract.errors import ConfigError, ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.skill_sidecars import (
    MAX_SIDECAR_BYTES,
    SIDECAR_FILE,
    SidecarBroken,
    build_argv,
    build_skill_spec,
    parse_sidecar,
)
from toolcrew.contract.skills import MAX_ARCHIVE_BYTES, MAX_BUNDLE_BYTES, MAX_BUNDLE_FILES, SkillBroken, parse_skill
from toolcrew.contract.specs import SkillSummary
from toolcrew.orchestrator.sdk.skill_folders import examine_skill
from toolcrew.workers.sandboxd import skill_store
from toolcrew.workers.sandboxd.skill_store import SkillVolume
from toolcrew.workers.skills.loader import load_skill, load_skills, pack_skill

LINE = st.text(st.characters(blacklist_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=80).filter(str.strip)

TAGS = (
    "int", "float", "bool", "timestamp", "binary", "set", "omap", "pairs", "null", "merge", "value",
    "python/name:os.system",
)  # fmt: skip
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


def test_skill_has_front_matter_body_and_files(tmp_path: Path) -> None:
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
    assert message in "\n".join(parse(matter).warnings)


def test_unquoted_colon_in_a_value_is_accepted() -> None:
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
def test_any_front_matter_is_parsed_or_refused(matter: str) -> None:
    with contextlib.suppress(SkillBroken):
        text = parse(matter)
        assert text.name
        assert text.description


@given(LINE, LINE)
def test_text_written_by_yaml_is_read_back(description: str, compatibility: str) -> None:
    text = parse(front(description=description, compatibility=compatibility))
    assert (text.description, text.compatibility) == (" ".join(description.split()), " ".join(compatibility.split()))


def test_broken_skill_is_logged_and_others_load(tmp_path: Path) -> None:
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


def test_first_root_wins_for_a_duplicate_name(tmp_path: Path) -> None:
    first, second = write_skill(tmp_path / "1", "a"), write_skill(tmp_path / "2", "a", body="other")
    with capture_logs() as logs:
        [skill] = load_skills([tmp_path / "1", tmp_path / "2"])
    assert str(skill.source) == str(first)
    assert [(log["event"], log["folder"]) for log in logs] == [("skill_shadowed", str(second))]


def test_missing_skills_root_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TOOLCREW_SKILLS"):
        load_skills([tmp_path / "none"])


def test_link_to_outside_is_refused_and_link_inside_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    inside = write_skill(tmp_path, "a", files={"b.md": "b"})
    (inside / "c.md").symlink_to("b.md")
    (inside / "all").symlink_to(".")
    assert [file.path for file in load_skill(inside).files] == ["SKILL.md", "b.md", "c.md"]
    (inside / "d.md").symlink_to("../secret")
    for load in (load_skill, examine_skill):
        with pytest.raises(SkillBroken, match="leads out"):
            load(inside)


def test_folders_nested_deeper_than_32_are_refused(tmp_path: Path) -> None:
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


def test_broken_sidecar_is_a_warning_and_the_skill_loads(tmp_path: Path) -> None:
    valid = write_skill(tmp_path, "a", files={"scripts/a.py": "1", SIDECAR_FILE: '{"entrypoint": "scripts/a.py"}'})
    broken = write_skill(tmp_path, "b", files={SIDECAR_FILE: '{"entrypoint": "scripts/a.py"}'})
    tool = load_skill(valid).tool
    assert (tool.spec.name, load_skill(valid).summary.warnings) == ("a", ())
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


def test_script_without_an_executable_bit_gives_a_warning(tmp_path: Path) -> None:
    folder = write_skill(tmp_path, "a", files={"scripts/a.py": "#!/bin/sh\n", "scripts/b.py": "import a\n"})
    (folder / "scripts" / "a.py").chmod(0o644)
    (folder / "scripts" / "b.py").chmod(0o644)
    expected = "scripts/a.py begins with #! and has no run bit: chmod +x it"
    assert load_skill(folder).summary.warnings == (expected,)
    assert examine_skill(folder).skill.warnings == (expected,)


def test_digest_depends_on_names_executable_bits_and_content(tmp_path: Path) -> None:
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


def test_changed_files_are_not_packed(tmp_path: Path) -> None:
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


def test_archive_with_the_longest_names_stays_below_the_archive_limit(tmp_path: Path) -> None:
    deep = "/".join(["d" * 250] * 15)
    folder = write_skill(tmp_path, "a", files={f"{deep}/{number:0250}": b"" for number in range(50)})
    skill = load_skill(folder)
    with pack_skill(skill) as packed:
        size = packed.seek(0, os.SEEK_END) - 2 * tarfile.RECORDSIZE
    assert (size - skill.summary.bytes) / len(skill.files) < (MAX_ARCHIVE_BYTES - MAX_BUNDLE_BYTES) / MAX_BUNDLE_FILES


SIDECAR_FILES = ("SKILL.md", "scripts/run.py")
LEAST = {"entrypoint": "scripts/run.py"}


def parse_fields(**fields: Any) -> Any:
    return parse_sidecar(json.dumps({**LEAST, **fields}).encode(), SIDECAR_FILES)


def nest_schema(depth: int) -> dict[str, Any]:
    return {"type": "object", **({"properties": {"a": nest_schema(depth - 1)}} if depth else {})}


def build_summary(name: str = "word-count", description: str = "Counts words.") -> SkillSummary:
    return SkillSummary(name=name, description=description, digest="0" * 64, files=2, bytes=1)


def test_sidecar_fields_are_in_the_tool_spec() -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    sidecar = parse_fields(
        parameters=parameters,
        timeout=30,
        requires_permission=True,
        dangerous=True,
        network=True,
        args="argv",
        interpreter="python3",
    )
    spec = build_skill_spec(build_summary(), sidecar)
    assert (spec.parameters, spec.timeout_s, spec.requires_permission, spec.dangerous) == (parameters, 30, True, True)
    assert spec.description.endswith("it needs network.")
    assert "with all of it; it needs network" in spec.with_network("with all of it").description


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"entrypoint": "scripts/none.py"}, "no file 'scripts/none.py'"),
        ({"entrypoint": "../run.py"}, "no file"),
        ({"entrypoint": ""}, "entrypoint"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": 1e9}, "timeout"),
        ({"timeout": "30"}, "timeout"),
        ({"network": 1}, "network"),
        ({"args": "env"}, "args"),
        ({"interpreter": "python3 -c evil"}, "interpreter"),
        ({"parameters": {"type": "array"}}, "object"),
        ({"parameters": {"type": "object", "properties": {"a": {"type": "no-type"}}}}, "parameters"),
        ({"parameters": {"type": "object", "properties": {"a": {"$ref": "https://example.org/x"}}}}, "not within it"),
        ({"parameters": "x"}, "parameters"),
        ({"parameters": nest_schema(150)}, "nested too deeply"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_invalid_sidecar_field_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SidecarBroken, match=message):
        parse_fields(**fields)


def build_sidecar_text(default: bytes) -> bytes:
    parameters = b'{"type": "object", "properties": {"a": {"default": ' + default + b"}}}"
    return b'{"entrypoint": "scripts/run.py", "parameters": ' + parameters + b"}"


@pytest.mark.parametrize(
    "text",
    [
        *[b"", b"[]", b"{", b"\xff", b"null", b"{}", b"[" * 10_000, b" " * (MAX_SIDECAR_BYTES + 1)],
        *map(build_sidecar_text, [b"NaN", b"Infinity", b"-Infinity", b"1e999"]),
    ],
    ids=lambda text: repr(text[-30:]),
)
def test_invalid_sidecar_file_is_refused(text: bytes) -> None:
    with pytest.raises(SidecarBroken):
        build_skill_spec(build_summary(), parse_sidecar(text, SIDECAR_FILES))


@pytest.mark.parametrize("name", ["a.b", "x" * 65, "a b"])
def test_invalid_skill_tool_name_is_refused(name: str) -> None:
    with pytest.raises((SidecarBroken, ValueError)):
        build_skill_spec(build_summary(name), parse_fields())


def test_build_argv_converts_arguments_to_options() -> None:
    parameters = {"path": "-rf", "deep": True, "quiet": False, "none": None, "n": [1, "b"], "at": {"x": "ü"}, "f": 1.5}
    assert build_argv(parameters) == ["--path=-rf", "--deep", "--n=1", "--n=b", '--at={"x": "ü"}', "--f=1.5"]


def test_all_problems_of_a_sidecar_are_reported_at_once() -> None:
    fields = {"entrypoint": "nope.py", "timeout": -1, "tiemout": 3, "parameters": {"type": "objekt"}}
    with pytest.raises(SidecarBroken) as broken:
        parse_fields(**fields)
    assert all(part in str(broken.value) for part in ("nope.py", "`timeout`", "tiemout", "objekt"))
    with pytest.raises(SidecarBroken) as broken:
        parse_fields(entrypoint="nope.py", parameters={"type": "objekt"})
    assert all(part in str(broken.value) for part in ("nope.py", "objekt"))


@given(st.binary(max_size=400))
def test_any_bytes_are_a_sidecar_or_refused(text: bytes) -> None:
    with contextlib.suppress(SidecarBroken):
        parse_sidecar(text, SIDECAR_FILES)


async def place_skill(store: SkillVolume, root: Path, scope: str, name: str) -> str:
    skill = load_skill(write_skill(root, name, files={"big": bytes(40_000)}))

    async def chunks() -> AsyncIterator[bytes]:
        with pack_skill(skill) as packed:
            yield packed.read()

    return await store.place(scope, skill.summary.digest, chunks())


async def test_tenant_evicts_only_its_own_skills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skill_store, "MAX_TENANT_BYTES", 100_000)
    monkeypatch.setattr(skill_store, "MAX_TOTAL_BYTES", 200_000)
    store = SkillVolume(FakeEngine(), "default", {})  # type: ignore[arg-type]
    first = await place_skill(store, tmp_path / "1", "acme", "a")
    with pytest.raises(ToolFailure, match="skills that tenant acme has used") as refused:
        await place_skill(store, tmp_path / "2", "acme", "b")
    assert refused.value.code is ErrorCode.QUOTA_EXCEEDED
    assert store.find("acme", load_skill(tmp_path / "1" / "a").summary.digest) == first
    await place_skill(store, tmp_path / "3", "rival", "c")
    await place_skill(store, tmp_path / "4", "", "d")
    with pytest.raises(SandboxUnavailable, match="restart sandboxd"):
        await place_skill(store, tmp_path / "5", "", "e")
