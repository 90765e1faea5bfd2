"""A session's own skills, from an untrusted sandbox: anything that it sends is a skill, no skill, or refused."""

import contextlib
import io
import json
import tarfile
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.guest.guest_exec import build_output_response
from tests.support.guest.search_answers import build_glob_done
from tests.support.records.builders import build_reply
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.guest_protocol import A, GlobRequest, GuestReply, GuestRequest, ReadFileRequest
from toolcrew.contract.settings import parser_environment
from toolcrew.contract.skills import SkillBroken
from toolcrew.workers.sandbox_client import GuestResponse
from toolcrew.workers.skills.archives import load_tar
from toolcrew.workers.skills.examiner import SkillExaminer
from toolcrew.workers.skills.of_session import MAX_BYTES, SessionSkills

FRONT = b"---\nname: own\ndescription: Does it.\n---\nDo it.\n"


class HostileEnvironment:
    """A tool environment whose guest sends the reply that the test gives."""

    def __init__(self, archive: bytes, *, total: int | None = None, **done: Any) -> None:
        self.context = SimpleNamespace(timeout_s=5.0, tenant="acme")
        self._archive = archive
        self._total = total
        self._done = done

    def run(self, request: GuestRequest[A], body: bytes = b"", on_data: Any = None) -> GuestReply[A]:
        return build_reply(request, self._answer(request, on_data))

    def _answer(self, request: GuestRequest[Any], on_data: Any) -> GuestResponse:
        if isinstance(request, ReadFileRequest):
            return GuestResponse({"size": len(FRONT)}, {"file": FRONT})
        if isinstance(request, GlobRequest):
            on_data("out", b"own/SKILL.md\nnot a name/SKILL.md\n\xff\n")
            return GuestResponse(build_glob_done())
        return build_output_response(self._archive, total=self._total, **self._done)


def archive_of(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for entry, data in entries:
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


def find(bench: Any) -> Any:
    return SessionSkills(SkillExaminer()).find("own", bench)


def test_skill_contains_only_regular_files_inside_its_folder() -> None:
    unsafe_entries = [
        entry("./../x"),
        entry("/etc/x"),
        entry("./a/../b"),
        entry("./link", tarfile.SYMTYPE, "/etc/passwd"),
    ]
    unsafe_entries += [
        entry("./hard", tarfile.LNKTYPE, "SKILL.md"),
        entry("./pipe", tarfile.FIFOTYPE),
        entry("./device", tarfile.CHRTYPE),
    ]
    archive = archive_of(
        (entry("./SKILL.md"), FRONT),
        (entry("./data/x"), b"0"),
        (entry("./data/x"), b"1"),
        *((name, b"") for name in unsafe_entries),
    )
    skill = find(HostileEnvironment(archive))
    assert [file.path for file in skill.files] == ["SKILL.md", "data/x"]
    assert skill.place == "/workspace/.skills/own"


def test_worker_process_does_not_parse_archives_of_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = archive_of((entry("./SKILL.md"), FRONT), (entry("./scripts/a"), b"#!/bin/sh"), (entry("./empty"), b""))
    expected = load_tar(archive, "own", "acme")
    for parser in ("toolcrew.workers.skills.archives.read_tar", "toolcrew.contract.skills.parse_skill", "yaml.load"):
        monkeypatch.setattr(parser, None)
    skill = find(HostileEnvironment(archive))
    assert skill.files == expected.files
    assert [skill.source.read(file.path) for file in skill.files] == [FRONT, b"", b"#!/bin/sh"]


@pytest.mark.parametrize(
    ("bench", "code"),
    [
        (HostileEnvironment(b"", cancelled=True), ErrorCode.CANCELLED),
        (HostileEnvironment(b"", timed_out=True), ErrorCode.TIMEOUT),
        (HostileEnvironment(b"", total=MAX_BYTES + 1), ErrorCode.INVALID_ARGUMENTS),
        (HostileEnvironment(archive_of((entry("./other"), b"x"))), ErrorCode.INVALID_ARGUMENTS),
        (
            HostileEnvironment(archive_of(*((entry(f"./{number}"), b"") for number in range(5000)))),
            ErrorCode.INVALID_ARGUMENTS,
        ),
    ],
)
def test_folder_that_is_not_a_skill_is_refused_with_a_code(bench: Any, code: ErrorCode) -> None:
    with pytest.raises(ToolFailure) as refused:
        find(bench)
    assert refused.value.code is code


@given(st.binary(max_size=3000), st.integers(0, 3000))
def test_any_archive_is_a_skill_or_refused(noise: bytes, at: int) -> None:
    whole = archive_of((entry("./SKILL.md"), FRONT), (entry("./a"), b"x" * 600))
    with contextlib.suppress(SkillBroken):
        assert load_tar(whole[:at] + noise + whole[at + len(noise) :], "own").name == "own"


BOMB = b"---\nname: own\ndescription: x\na0: &a0 {x: 1}\n" + b"".join(
    b"a%d: &a%d\n  <<:\n%b" % (level, level, b"".join(b"  - *a%d\n" % (level - 1) for _ in range(10)))
    for level in range(1, 12)
)
SIDECAR = json.dumps(
    {"entrypoint": "scripts/run.py", "parameters": {"type": "object", "properties": {"a": {"pattern": "(a+)+$"}}}}
).encode()


def test_yaml_bomb_in_the_front_matter_is_refused_quickly() -> None:
    began = time.process_time()
    with pytest.raises(ToolFailure) as refused:
        find(HostileEnvironment(archive_of((entry("./SKILL.md"), BOMB + b"---\n"))))
    assert (refused.value.code, "anchors or aliases" in str(refused.value)) == (ErrorCode.INVALID_ARGUMENTS, True)
    assert time.process_time() - began < 1


def test_regex_patterns_in_a_session_skill_schema_are_dropped() -> None:
    archive = archive_of(
        (entry("./SKILL.md"), FRONT), (entry("./scripts/run.py"), b"x"), (entry("./skill.tool.json"), SIDECAR)
    )
    assert find(HostileEnvironment(archive)).tool.spec.parameters["properties"] == {"a": {}}


def test_parser_process_has_no_secrets_and_results_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLCREW_SECRET", "s")
    monkeypatch.setenv("OPENAI_API_KEY", "s")
    assert not [name for name in parser_environment() if name.startswith(("TOOLCREW_", "OPENAI_"))]
    skills, archive = SessionSkills(SkillExaminer()), archive_of((entry("./SKILL.md"), FRONT))
    first: Any = skills.find("own", HostileEnvironment(archive))  # type: ignore[arg-type]
    monkeypatch.setattr("toolcrew.workers.skills.examiner.subprocess", None)
    second: Any = skills.find("own", HostileEnvironment(archive))  # type: ignore[arg-type]
    assert (second.summary, second.body) == (first.summary, first.body)


def test_failed_parser_process_fails_only_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolcrew.workers.skills.examiner.EXAMINE_S", 0.0)
    with pytest.raises(ToolFailure) as refused:
        find(HostileEnvironment(archive_of((entry("./SKILL.md"), FRONT))))
    assert "limit of time or memory" in str(refused.value)


def test_archive_of_a_failed_tar_command_is_refused() -> None:
    with pytest.raises(ToolFailure, match="could not read"):
        find(HostileEnvironment(archive_of((entry("./SKILL.md"), FRONT)), exit_code=2))


def test_skill_list_contains_only_valid_names() -> None:
    skills: Any = SessionSkills(SkillExaminer()).all(HostileEnvironment(b""))  # type: ignore[arg-type]
    assert skills == {"own": "Does it."}
