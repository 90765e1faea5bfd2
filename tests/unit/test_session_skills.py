"""A session's own skills, from an untrusted sandbox: anything that it sends is a skill, no skill, or refused."""

import contextlib
import io
import json
import tarfile
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ErrorCode, ToolFailure
from contract.settings import parser_environment
from contract.skills import SkillBroken
from workers.sandbox_client import GuestResponse
from workers.skills.archives import load_tar
from workers.skills.examiner import SkillExaminer
from workers.skills.of_session import MAX_BYTES, SessionSkills

FRONT = b"---\nname: own\ndescription: Does it.\n---\nDo it.\n"


class Liar:
    """A tool environment whose guest sends the reply that the test gives."""

    def __init__(self, archive: bytes, *, total: int | None = None, **done: Any) -> None:
        self.context = SimpleNamespace(timeout_s=5.0, tenant="acme")
        self._archive, self._total, self._done = archive, total, done

    def run(self, request: Mapping[str, Any], body: bytes = b"", on_data: Any = None) -> GuestResponse:
        if request["op"] == "read_file":
            return GuestResponse({}, {"file": FRONT})
        if request["op"] == "glob":
            on_data("out", b"own/SKILL.md\nnot a name/SKILL.md\n\xff\n")
            return GuestResponse({}, {})
        total = self._total if self._total is not None else len(self._archive)
        done = {
            "cancelled": False,
            "timed_out": False,
            "exit_code": 0,
            "streams": {"stdout": {"total": total}},
            **self._done,
        }
        return GuestResponse(done, {"stdout": self._archive})


def archive_of(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for entry, data in entries:
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


def find(bench: Any) -> Any:
    return SessionSkills(SkillExaminer()).find("own", bench)


def test_only_plain_files_within_the_folder_are_the_skills() -> None:
    odd = [entry("./../x"), entry("/etc/x"), entry("./a/../b"), entry("./link", tarfile.SYMTYPE, "/etc/passwd")]
    odd += [
        entry("./hard", tarfile.LNKTYPE, "SKILL.md"),
        entry("./pipe", tarfile.FIFOTYPE),
        entry("./device", tarfile.CHRTYPE),
    ]
    archive = archive_of(
        (entry("./SKILL.md"), FRONT),
        (entry("./data/x"), b"0"),
        (entry("./data/x"), b"1"),
        *((name, b"") for name in odd),
    )
    skill = find(Liar(archive))
    assert [file.path for file in skill.files] == ["SKILL.md", "data/x"]
    assert skill.place == "/workspace/.skills/own"


def test_a_worker_does_not_parse_what_a_sandbox_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = archive_of((entry("./SKILL.md"), FRONT), (entry("./scripts/a"), b"#!/bin/sh"), (entry("./empty"), b""))
    expected = load_tar(archive, "own", "acme")
    for parser in ("workers.skills.archives.read_tar", "contract.skills.parse_skill", "yaml.load"):
        monkeypatch.setattr(parser, None)
    skill = find(Liar(archive))
    assert skill.files == expected.files
    assert [skill.source.read(file.path) for file in skill.files] == [FRONT, b"", b"#!/bin/sh"]


@pytest.mark.parametrize(
    ("bench", "code"),
    [
        (Liar(b"", cancelled=True), ErrorCode.CANCELLED),
        (Liar(b"", timed_out=True), ErrorCode.TIMEOUT),
        (Liar(b"", total=MAX_BYTES + 1), ErrorCode.INVALID_ARGUMENTS),
        (Liar(archive_of((entry("./other"), b"x"))), ErrorCode.INVALID_ARGUMENTS),
        (Liar(archive_of(*((entry(f"./{number}"), b"") for number in range(5000)))), ErrorCode.INVALID_ARGUMENTS),
    ],
)
def test_a_folder_that_is_no_skill_says_why(bench: Any, code: ErrorCode) -> None:
    with pytest.raises(ToolFailure) as refused:
        find(bench)
    assert refused.value.code is code


@given(st.binary(max_size=3000), st.integers(0, 3000))
def test_whatever_comes_out_of_the_sandbox_is_a_skill_or_refused(junk: bytes, at: int) -> None:
    whole = archive_of((entry("./SKILL.md"), FRONT), (entry("./a"), b"x" * 600))
    with contextlib.suppress(SkillBroken):
        assert load_tar(whole[:at] + junk + whole[at + len(junk) :], "own").name == "own"


BOMB = b"---\nname: own\ndescription: x\na0: &a0 {x: 1}\n" + b"".join(
    b"a%d: &a%d\n  <<:\n%b" % (level, level, b"".join(b"  - *a%d\n" % (level - 1) for _ in range(10)))
    for level in range(1, 12)
)
SIDECAR = json.dumps(
    {"entrypoint": "scripts/run.py", "parameters": {"type": "object", "properties": {"a": {"pattern": "(a+)+$"}}}}
).encode()


def test_a_front_matter_that_would_expand_to_gigabytes_is_refused_before_it_is_built() -> None:
    began = time.process_time()
    with pytest.raises(ToolFailure) as refused:
        find(Liar(archive_of((entry("./SKILL.md"), BOMB + b"---\n"))))
    assert (refused.value.code, "anchors or aliases" in str(refused.value)) == (ErrorCode.INVALID_ARGUMENTS, True)
    assert time.process_time() - began < 1


def test_a_schema_of_a_session_is_bounded_like_those_of_tenants() -> None:
    archive = archive_of(
        (entry("./SKILL.md"), FRONT), (entry("./scripts/run.py"), b"x"), (entry("./skill.tool.json"), SIDECAR)
    )
    assert find(Liar(archive)).tool.spec.parameters["properties"] == {"a": {}}


def test_the_parser_gets_no_secret_and_starts_once_per_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLCREW_SECRET", "s")
    monkeypatch.setenv("OPENAI_API_KEY", "s")
    assert not [name for name in parser_environment() if name.startswith(("TOOLCREW_", "OPENAI_"))]
    skills, archive = SessionSkills(SkillExaminer()), archive_of((entry("./SKILL.md"), FRONT))
    first: Any = skills.find("own", Liar(archive))  # type: ignore[arg-type]
    monkeypatch.setattr("workers.skills.examiner.subprocess", None)
    again: Any = skills.find("own", Liar(archive))  # type: ignore[arg-type]
    assert (again.summary, again.body) == (first.summary, first.body)


def test_a_process_that_fails_costs_its_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.skills.examiner.EXAMINE_S", 0.0)
    with pytest.raises(ToolFailure) as refused:
        find(Liar(archive_of((entry("./SKILL.md"), FRONT))))
    assert "limit of time or memory" in str(refused.value)


def test_a_tar_that_failed_is_not_taken_for_a_skill() -> None:
    with pytest.raises(ToolFailure, match="could not read"):
        find(Liar(archive_of((entry("./SKILL.md"), FRONT)), exit_code=2))


def test_a_list_names_only_what_can_be_a_skill() -> None:
    skills: Any = SessionSkills(SkillExaminer()).all(Liar(b""))  # type: ignore[arg-type]
    assert skills == {"own": "Does it."}
