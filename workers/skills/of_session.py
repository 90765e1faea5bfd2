"""The skills that a session has in its own workspace, below /workspace/.skills. The sandbox's word: as hostile as anything that comes out of one."""

import io
import re
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from contract.errors import ErrorCode, ToolFailure
from contract.skills import MAX_BUNDLE_FILES, MAX_SKILL_FILE_BYTES, SKILL_FILE, SkillBroken, parse_skill
from workers.skills.archives import Member, load_members
from workers.skills.loader import Skill
from workers.tools.base import Workbench

ROOT = "/workspace/.skills"
MAX_BYTES = 16 * 1024 * 1024
"""Of one skill: it is read whole, at each call."""
MAX_LISTED = 50
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LIST_BYTES = 16_384


class SessionSkills:
    """Those of whichever session a call is in."""

    def find(self, name: str, bench: Workbench) -> Skill | None:
        """The session's skill in the folder of that name; None when there is none. It is run where it lies.

        Raises ToolFailure for a folder that is no skill, SandboxUnavailable.
        """
        if not _NAME.fullmatch(name) or _read_front(name, bench) is None:
            return None
        try:
            skill = load_members(f"{ROOT}/{name}", name, _read_members(name, bench))
        except SkillBroken as broken:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{ROOT}/{name} is no skill: {broken}") from broken
        return replace(skill, place=f"{ROOT}/{name}")

    def all(self, bench: Workbench) -> dict[str, str]:
        """What those say of themselves that can be told of, by the names of their folders: at most MAX_LISTED."""
        found: dict[str, str] = {}
        for name in _list_folders(bench):
            text = _read_front(name, bench) or b""
            with suppress(SkillBroken):
                found[name] = parse_skill(text.decode("utf-8", "replace"), name).description
        return found


def _list_folders(bench: Workbench) -> list[str]:
    lines = bytearray()
    request = {"op": "glob", "pattern": f"*/{SKILL_FILE}", "path": ROOT, "kind": "file", "limit": MAX_LISTED, "include_ignored": True}
    try:
        bench.run({**request, "max_bytes": _LIST_BYTES, "timeout_s": bench.context.timeout_s}, on_data=lambda _, data: lines.extend(data))
    except ToolFailure as failure:
        if failure.code in (ErrorCode.FILE_NOT_FOUND, ErrorCode.NOT_A_DIRECTORY):
            return []
        raise
    names = [line.removesuffix(f"/{SKILL_FILE}").rpartition("/")[2] for line in lines.decode("utf-8", "replace").splitlines()]
    return sorted({name for name in names if _NAME.fullmatch(name)})[:MAX_LISTED]


def _read_front(name: str, bench: Workbench) -> bytes | None:
    """The folder's SKILL.md; None when there is none that can be read."""
    request = {
        "op": "read_file",
        "path": f"{ROOT}/{name}/{SKILL_FILE}",
        "max_bytes": MAX_SKILL_FILE_BYTES,
        "timeout_s": bench.context.timeout_s,
    }
    try:
        return bench.run(request).streams.get("file", b"")
    except ToolFailure as failure:
        if failure.code in _NOT_THERE:
            return None
        raise


_NOT_THERE = (
    ErrorCode.FILE_NOT_FOUND,
    ErrorCode.NOT_A_DIRECTORY,
    ErrorCode.IS_DIRECTORY,
    ErrorCode.PATH_NOT_ALLOWED,
    ErrorCode.FILE_TOO_LARGE,
)


def _read_members(name: str, bench: Workbench) -> list[Member]:
    """Raises SkillBroken, ToolFailure."""
    request = {
        "op": "exec",
        "argv": ["tar", "-c", "-f", "-", "-C", f"{ROOT}/{name}", "."],
        "script_bytes": 0,
        "cwd": "/workspace",
        "env": {},
        "timeout_s": bench.context.timeout_s,
        "capture": {"stdout": MAX_BYTES, "stderr": 4096},
    }
    response = bench.run(request)
    if response.done["cancelled"]:
        raise ToolFailure(ErrorCode.CANCELLED, "the call was cancelled while its skill was read")
    if response.done["timed_out"]:
        raise ToolFailure(ErrorCode.TIMEOUT, f"reading {ROOT}/{name} took all of {bench.context.timeout_s:g} s")
    data = response.streams.get("stdout", b"")
    if int(response.done["streams"]["stdout"]["total"]) > len(data):
        raise SkillBroken(f"it is larger than the {MAX_BYTES // 1024 // 1024} MiB that a session's own may have")
    try:
        return list(_plain_files(data))
    except (tarfile.TarError, EOFError, ValueError, OSError) as error:
        raise SkillBroken("its files could not be read") from error


def _plain_files(data: bytes) -> Iterator[Member]:
    """Links, devices and files with holes are left out: what is no plain file is none of the skill's."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for number, entry in enumerate(archive):
            if number > 2 * MAX_BUNDLE_FILES:
                raise ValueError("too many entries")
            path = entry.name.removeprefix("./")
            if not entry.isreg() or entry.sparse is not None or any(part in ("", ".", "..") for part in path.split("/")):
                continue
            content = archive.extractfile(entry)
            yield Member(path, content.read() if content is not None else b"", bool(entry.mode & 0o100))
