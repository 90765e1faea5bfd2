"""Skills in a session's own workspace, below /workspace/.skills.

They come from the sandbox, so their content may be hostile.
"""

import json
import re
from contextlib import suppress

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.guest_protocol import ExecRequest, GlobRequest, ReadFileRequest
from toolcrew.contract.own_programs import own_program
from toolcrew.contract.skill_sidecars import Sidecar
from toolcrew.contract.skills import MAX_SKILL_FILE_BYTES, SKILL_FILE, BundleFile, SkillBroken
from toolcrew.contract.specs import SkillSummary, ToolSpec
from toolcrew.workers.skills.examiner import SkillExaminer
from toolcrew.workers.skills.loader import Skill, SkillTool
from toolcrew.workers.skills.sources import MemorySource
from toolcrew.workers.tools.base import ToolEnvironment

ROOT = "/workspace/.skills"
MAX_BYTES = 16 * 1024 * 1024
"""Maximum size of one skill, in bytes. Each call reads the whole skill from the sandbox."""
MAX_LISTED = 50
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LIST_BYTES = 16_384


class SessionSkills:
    """The skills of a call's session. `examiner` parses their content in a separate process."""

    def __init__(self, examiner: SkillExaminer) -> None:
        self._examiner = examiner

    def find(self, name: str, environment: ToolEnvironment) -> Skill | None:
        """Return the session's skill in the folder of that name; None when there is no such folder.

        The skill runs in that folder.

        Raises ToolFailure for a folder that is no skill, and SandboxUnavailable.
        """
        if not _NAME.fullmatch(name) or _read_front(name, environment) is None:
            return None
        try:
            return self._load(name, _read_folder(name, environment), environment.context.tenant)
        except SkillBroken as broken:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{ROOT}/{name} is not a valid skill: {broken}") from broken

    def _load(self, name: str, archive: bytes, tenant: str) -> Skill:
        answer = self._examiner.examine((name, "--tar", f"--owner={tenant}"), archive)
        entries = sorted(answer["files"])
        data = {path: archive[offset : offset + size] for path, offset, size, _ in entries}
        files = tuple(BundleFile(path, size, is_executable, data[path][:2]) for path, _, size, is_executable in entries)
        tool = answer["tool"]
        return Skill(
            MemorySource(f"{ROOT}/{name}", data),
            SkillSummary.model_validate(answer["skill"]),
            answer["body"],
            files,
            SkillTool(Sidecar.model_validate(answer["sidecar"]), ToolSpec.model_validate(tool))
            if tool is not None
            else None,
            tenant,
            f"{ROOT}/{name}",
        )

    def all(self, environment: ToolEnvironment) -> dict[str, str]:
        """Return folder name -> description for the session's valid skills, at most MAX_LISTED."""
        fronts = {
            name: (_read_front(name, environment) or b"").decode("utf-8", "replace")
            for name in _list_folders(environment)
        }
        if not fronts:
            return {}
        with suppress(SkillBroken):
            descriptions: dict[str, str] = self._examiner.examine(("fronts", "--fronts"), json.dumps(fronts).encode())[
                "descriptions"
            ]
            return descriptions
        return {}


def _list_folders(environment: ToolEnvironment) -> list[str]:
    lines = bytearray()
    request = GlobRequest(
        pattern=f"*/{SKILL_FILE}",
        path=ROOT,
        kind="file",
        limit=MAX_LISTED,
        include_ignored=True,
        max_bytes=_LIST_BYTES,
        timeout_s=environment.context.timeout_s,
    )
    try:
        environment.run(request, on_data=lambda _, data: lines.extend(data))
    except ToolFailure as failure:
        if failure.code in (ErrorCode.FILE_NOT_FOUND, ErrorCode.NOT_A_DIRECTORY):
            return []
        raise
    names = [
        line.removesuffix(f"/{SKILL_FILE}").rpartition("/")[2] for line in lines.decode("utf-8", "replace").splitlines()
    ]
    return sorted({name for name in names if _NAME.fullmatch(name)})[:MAX_LISTED]


def _read_front(name: str, environment: ToolEnvironment) -> bytes | None:
    """Return the text of the folder's SKILL.md; None when it is missing or cannot be read."""
    request = ReadFileRequest(
        path=f"{ROOT}/{name}/{SKILL_FILE}",
        max_bytes=MAX_SKILL_FILE_BYTES,
        timeout_s=environment.context.timeout_s,
    )
    try:
        return environment.run(request).streams.get("file", b"")
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


def _read_folder(name: str, environment: ToolEnvironment) -> bytes:
    """Return the skill's folder as a tar archive. Raises SkillBroken, ToolFailure."""
    request = ExecRequest(
        argv=own_program("tar", "-c", "-f", "-", "-C", f"{ROOT}/{name}", "."),
        cwd="/workspace",
        capture={"stdout": MAX_BYTES, "stderr": 4096},
        timeout_s=environment.context.timeout_s,
    )
    reply = environment.run(request)
    answer = reply.answer
    if answer.cancelled:
        raise ToolFailure(ErrorCode.CANCELLED, "the call was cancelled while its skill was read")
    if answer.timed_out:
        raise ToolFailure(
            ErrorCode.TIMEOUT,
            f"reading {ROOT}/{name} took all of {environment.context.timeout_s:g} s: make the skill smaller",
        )
    data = reply.streams.get("stdout", b"")
    if answer.streams["stdout"].total > len(data):
        raise SkillBroken(
            f"it is larger than the {MAX_BYTES // 1024 // 1024} MiB that a skill of a session may have: remove files"
        )
    if answer.exit_code != 0:
        raise SkillBroken("tar could not read all of its files")
    return data
