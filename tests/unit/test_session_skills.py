"""A session's own skills, out of a sandbox that lies: whatever it sends is a skill, none, or refused."""

import io
import tarfile
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ErrorCode, ToolFailure
from workers.sandbox_client import GuestResponse
from workers.skills.of_session import MAX_BYTES, SessionSkills

FRONT = b"---\nname: own\ndescription: Does it.\n---\nDo it.\n"


class Liar:
    """A bench whose guest says what it is told to."""

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
        done = {"cancelled": False, "timed_out": False, "streams": {"stdout": {"total": total}}, **self._done}
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
    return SessionSkills().find("own", bench)


def test_only_plain_files_within_the_folder_are_the_skills() -> None:
    odd = [entry("./../x"), entry("/etc/x"), entry("./a/../b"), entry("./link", tarfile.SYMTYPE, "/etc/passwd")]
    odd += [entry("./hard", tarfile.LNKTYPE, "SKILL.md"), entry("./pipe", tarfile.FIFOTYPE), entry("./device", tarfile.CHRTYPE)]
    archive = archive_of((entry("./SKILL.md"), FRONT), (entry("./data/x"), b"0"), (entry("./data/x"), b"1"), *((one, b"") for one in odd))
    skill = find(Liar(archive))
    assert [file.path for file in skill.files] == ["SKILL.md", "data/x"]
    assert skill.place == "/workspace/.skills/own"


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
    try:
        assert find(Liar(whole[:at] + junk + whole[at + len(junk) :])).name
    except ToolFailure as failure:
        assert failure.code is ErrorCode.INVALID_ARGUMENTS  # noqa: PT017


def test_a_list_names_only_what_can_be_a_skill() -> None:
    told: Any = SessionSkills().all(Liar(b""))  # type: ignore[arg-type]
    assert told == {"own": "Does it."}
