"""Skills as .zip files and bundles: packing and unpacking restores the files, and unusual entries are refused before
unpacking.
"""

import contextlib
import io
import os
import stat
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.records.skill_harness import write_skill
from toolcrew.contract.skills import MAX_BUNDLE_BYTES, MAX_BUNDLE_FILES, SkillBroken
from toolcrew.orchestrator.sdk import skill_folders
from toolcrew.orchestrator.sdk.skill_folders import examine_skill
from toolcrew.workers.skills.archives import compress_bundle, expand_bundle, load_members, load_zip, write_zip
from toolcrew.workers.skills.loader import load_skill, pack_skill

FRONT = "---\nname: pdf\ndescription: Fills forms.\n---\nDo it.\n"
Fill = Callable[[zipfile.ZipFile], object]


def zip_of(tmp_path: Path, fill: Fill, front: str = FRONT) -> Path:
    path = tmp_path / "pdf.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pdf/SKILL.md", front)
        fill(archive)
    return path


def entry(name: str, kind: int = stat.S_IFREG, mode: int = 0o644) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, (kind | mode) << 16
    return info


def test_packed_skill_is_unpacked_unchanged(tmp_path: Path) -> None:
    folder = write_skill(
        tmp_path, "pdf", files={"scripts/a.py": "#!/bin/sh\n", "references/ü b.md": b"\x00\xff", "empty": b""}
    )
    skill = load_skill(folder)
    packed = [io.BytesIO(), io.BytesIO()]
    for target in packed:
        write_zip(skill, target)
    assert packed[0].getvalue() == packed[1].getvalue()
    (tmp_path / "other.zip").write_bytes(packed[0].getvalue())
    back = load_zip(tmp_path / "other.zip")
    assert (back.summary, back.body) == (skill.summary, skill.body)
    assert back.source.read("references/ü b.md") == b"\x00\xff"
    with pack_skill(back) as first, pack_skill(skill) as other:
        assert first.read() == other.read()
    stored = load_members("kept", "pdf", expand_bundle(compress_bundle(back)), owner="acme")
    assert (stored.summary, stored.owner) == (skill.summary, "acme")


def test_zip_may_contain_a_folder_or_its_content_and_junk_is_ignored(tmp_path: Path) -> None:
    at_top = tmp_path / "pdf.zip"
    with zipfile.ZipFile(at_top, "w") as archive:
        archive.writestr("SKILL.md", FRONT)
        archive.writestr("scripts/a.py", "print()")
    assert load_zip(at_top).summary.warnings == ()
    with_junk = zip_of(
        tmp_path,
        lambda archive: [
            archive.writestr(name, "x")
            for name in ("pdf/.git/config", "__MACOSX/pdf/._SKILL.md", "pdf/a/__pycache__/b")
        ],
    )
    assert [file.path for file in load_zip(with_junk).files] == ["SKILL.md"]


@pytest.mark.parametrize(
    ("fill", "expected"),
    [
        (lambda archive: archive.writestr(entry("pdf/link", stat.S_IFLNK), "/etc/passwd"), "is not a regular file"),
        (lambda archive: archive.writestr(entry("pdf/device", stat.S_IFCHR), ""), "is not a regular file"),
        (lambda archive: archive.writestr(entry("pdf/pipe", stat.S_IFIFO), ""), "is not a regular file"),
        (lambda archive: archive.writestr("pdf/../../x", "x"), "is not a path within a folder"),
        (lambda archive: archive.writestr("/etc/x", "x"), "is not a path within a folder"),
        (lambda archive: archive.writestr("pdf//x", "x"), "is not a path within a folder"),
        (lambda archive: archive.writestr("pdf/a\\..\\x", "x"), "is not a path within a folder"),
        (lambda archive: archive.writestr("pdf/\x1b[2J", "x"), "is not a path within a folder"),
        (lambda archive: archive.writestr("pdf/" + "a/" * 40 + "x", "x"), "nested more than"),
        (lambda archive: archive.writestr("pdf/" + "a" * 2000, "x"), "is not a path within a folder"),
        (lambda archive: [archive.writestr(name, "x") for name in ("pdf/a", "pdf/a/b")], "is below a file"),
        (
            lambda archive: [archive.writestr(f"pdf/{number}", "") for number in range(MAX_BUNDLE_FILES + 1)],
            "more than 2000 files",
        ),
        (lambda archive: archive.writestr("pdf/zeros", bytes(MAX_BUNDLE_BYTES)), "larger than 64 MiB"),
    ],
)
def test_unsafe_zip_entries_are_refused(tmp_path: Path, fill: Fill, expected: str) -> None:
    with pytest.raises(SkillBroken, match=expected):
        load_zip(zip_of(tmp_path, fill))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicate_names_in_a_zip_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SkillBroken, match="occurs twice in it"):
        load_zip(zip_of(tmp_path, lambda archive: archive.writestr("pdf/SKILL.md", "other")))


def test_zip_entry_with_a_false_size_is_refused(tmp_path: Path) -> None:
    path = zip_of(tmp_path, lambda archive: archive.writestr("pdf/zeros", bytes(MAX_BUNDLE_BYTES)))
    data = path.read_bytes().replace(MAX_BUNDLE_BYTES.to_bytes(4, "little"), (10).to_bytes(4, "little"))
    path.write_bytes(data)
    with pytest.raises(SkillBroken):
        load_zip(path)


def test_zip_without_a_skill_or_with_encryption_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "x.zip"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a/b", "x")
        archive.writestr("c/SKILL.md", FRONT)
    with pytest.raises(SkillBroken, match=r"no SKILL.md at its top"):
        load_zip(other)
    encrypted = zip_of(tmp_path, lambda archive: archive.writestr("pdf/a", "x"))
    data = bytearray(encrypted.read_bytes())
    at = data.rindex(b"PK\x01\x02")
    data[at + 8] |= 1
    encrypted.write_bytes(data)
    with pytest.raises(SkillBroken, match="is encrypted"):
        load_zip(encrypted)


def test_hostile_archive_is_examined_in_a_separate_process(tmp_path: Path) -> None:
    with pytest.raises(SkillBroken, match="is not a regular file"):
        examine_skill(
            zip_of(tmp_path, lambda archive: archive.writestr(entry("pdf/link", stat.S_IFLNK), "/etc/passwd"))
        )
    (tmp_path / "x.zip").write_bytes(b"PK\x03\x04nothing")
    with pytest.raises(SkillBroken, match=r"not a readable .zip file"):
        examine_skill(tmp_path / "x.zip")
    folder = write_skill(tmp_path, "word", files={"a": "b"})
    examined = examine_skill(folder, as_zip=tmp_path / "word.zip", as_bundle=tmp_path / "bundle")
    assert examine_skill(tmp_path / "word.zip") == examined
    assert len(expand_bundle((tmp_path / "bundle").read_bytes())) == 2


@settings(deadline=None)
@given(st.binary(max_size=2000), st.integers(0, 400))
def test_damaged_zip_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int) -> None:
    folder = tmp_path_factory.mktemp("zip")
    path = zip_of(folder, lambda archive: archive.writestr("pdf/a", "x" * 50))
    data = path.read_bytes()
    path.write_bytes(data[:at] + noise + data[at + len(noise) :])
    with contextlib.suppress(SkillBroken):
        assert load_zip(path).name == "pdf"


@given(st.binary(max_size=500))
def test_any_stored_bytes_are_refused_as_a_bundle(noise: bytes) -> None:
    with pytest.raises(SkillBroken):
        expand_bundle(noise)


def test_largest_skill_is_examined_within_the_memory_limit(tmp_path: Path) -> None:
    folder = write_skill(tmp_path, "large", files={f"part-{number}": os.urandom(10_000_000) for number in range(6)})
    examined = examine_skill(folder, as_zip=tmp_path / "large.zip", as_bundle=tmp_path / "bundle")
    assert examine_skill(tmp_path / "large.zip", as_bundle=tmp_path / "again") == examined
    assert (tmp_path / "again").read_bytes() == (tmp_path / "bundle").read_bytes()


def test_examining_process_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program parses a tenant's data, so a tenant's code may run there."""
    print_environment = "import json, os; print(json.dumps({'broken': ' '.join(os.environ)}))"
    monkeypatch.setattr(skill_folders, "program", lambda _: [sys.executable, "-c", print_environment])
    for name in ("TOOLCREW_SECRET", "TOOLCREW_REDIS_URL", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    with pytest.raises(SkillBroken) as refused:
        examine_skill(tmp_path)
    assert not {"TOOLCREW_SECRET", "TOOLCREW_REDIS_URL", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"} & set(
        str(refused.value).split()
    )
