"""Grades items. The artifacts of an ended item are copied to a new sandbox, where the grader's command decides the
reward.

Security: everything that comes from the agent's sandbox is hostile, also the output of its `find` and `tar`. Only the
bytes of regular files with plain names are copied out of that sandbox. These bytes are copied once, when no process of
the agent runs. Programs of the agent never run in this process; what runs in the grader's sandbox is the grader's
choice (docs/batches.md).

Invariant: a reward is accepted only if the grader's command has ended, and if its sandbox was the same from the start
of the command until the reward was read. Every other end is a failure of the infrastructure or of the grader.
"""

import asyncio
import io
import os
import re
import tarfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolcrew.concurrency.tasks import is_being_cancelled, retry_until_available
from toolcrew.concurrency.tenant_threads import in_tenant_thread
from toolcrew.contract.calls import ExecResult
from toolcrew.contract.errors import ErrorCode, OperatorError, SandboxUnavailable, ToolFailure
from toolcrew.contract.own_programs import own_program
from toolcrew.contract.run_events import Failure, FailureKind, Grade, SubmissionTaken
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.contract.tar_archives import read_tar
from toolcrew.orchestrator.batches.artifacts import NO_FILE, CopiedFiles, choose_paths
from toolcrew.orchestrator.batches.rewards import InvalidReward, parse_reward
from toolcrew.orchestrator.runs.item_sessions import ItemSessions
from toolcrew.orchestrator.runs.journal import Journal
from toolcrew.orchestrator.runs.outcomes import GRADER_ERROR, judge_error
from toolcrew.orchestrator.runs.run_gate import QUOTA_CODES
from toolcrew.orchestrator.sessions.session import SandboxProgramFailed, Session
from toolcrew.store.batches import ARTIFACTS_FOLDER, Grader
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_FILES = 2000
MAX_BYTES = 16 * 1024 * 1024
MAX_NAME_BYTES = 1024
MAX_OUTPUT_CHARS = 4000
TRIES = 3
"""Number of tries to grade one attempt, each in a new sandbox, if the infrastructure fails."""
RETRY_S = 1.0
LIST_TIMEOUT_S = 120.0
_START_LIST = "/output/.files-at-start"
# A process that resumes the run finds the list of the first one.
_LIST_START = """
[ -e "$1" ] || { find . -xdev -type f -printf '%s %T@ %P\\0' > "$1.part" && mv -- "$1.part" "$1"; }
"""
# The agent can change the list of the files at the start, which is in its sandbox. It can only choose thereby which
# files it submits, and it may choose them anyway.
_LIST_CHANGED = """
set -o pipefail
[ -e "$1" ] || : > "$1"
find . -xdev -type f -printf '%s %T@ %P\\0' | python3 -I -S -c "$2" "$1"
"""
_SELECT_NEW = """
import sys
with open(sys.argv[1], "rb") as file:
    known = {b"", *file.read().split(b"\\0")}
for entry in sys.stdin.buffer.read().split(b"\\0"):
    if entry not in known:
        sys.stdout.buffer.write(entry + b"\\0")
"""
"""Program in Python that prints the entries of its input that are not in a list."""
_PRINT = "%s %T@ %P\\0"
_PRINT_OTHER = "%y %T@ %P\\0"
"""Format for what is no file: the letter of its type in the place of the size."""
_NO_FILE = {**NO_FILE, "l": "it is a link"}
MAX_MISSING = 20
"""Largest number of missing artifacts that a grade names."""
_UNREADABLE = 1
"""Exit code of find when it could not read some folders."""
_WILD = re.compile(r"[*?\[]")
_NOT_PLAIN = re.compile(r"[\x00-\x1f\x7f]")
_ABOUT_FILES = frozenset(
    {
        ErrorCode.FILE_NOT_FOUND,
        ErrorCode.FILE_TOO_LARGE,
        ErrorCode.INVALID_ARGUMENTS,
        ErrorCode.INVALID_PATTERN,
        ErrorCode.IS_DIRECTORY,
        ErrorCode.NOT_A_DIRECTORY,
        ErrorCode.NO_SPACE,
        ErrorCode.PATH_NOT_ALLOWED,
    }
)
"""Error codes that mean that the call ran and that the files of the sandbox caused the error. Any other code says
nothing about the files.
"""


class _ArtifactsRefused(Exception):
    """The artifacts of an item break the rules. The message is a sentence."""


class _GraderFailed(Exception):
    """The command of the grader has ended without a valid reward. The message is a sentence."""


@dataclass(frozen=True)
class GradingResult:
    """The end of a grading: a grade, or the failure of the grader. `output`: the end of what the command printed."""

    grade: Grade | None = None
    failure: Failure | None = None
    output: str = ""


@dataclass(frozen=True)
class Submission:
    """The artifacts of an agent as a new archive. `refusal`: why the artifacts were refused; "" if they were
    accepted.
    """

    archive: bytes = b""
    files: int = 0
    bytes: int = 0
    refusal: str = ""
    missing: tuple[str, ...] = ()
    """Why declared artifacts were not copied."""


def is_gradable(failure: Failure | None) -> bool:
    """Return whether an item with this end has a result to grade. A model that reached a limit is graded too."""
    return failure is None or failure.kind in (FailureKind.MODEL, FailureKind.TOOL)


class Grading:
    """Grades the items that one process runs."""

    def __init__(self, sessions: ItemSessions) -> None:
        self._sessions = sessions

    async def take(
        self,
        session: Session,
        grader: Grader,
        journal: Journal,
        body: dict[str, Any] | None,
        failure: Failure | None,
    ) -> SubmissionTaken:
        """End the background jobs of an item, copy its artifacts for the grader, and log them. Raises OperatorError,
        ToolFailure.
        """
        submission = await take_submission(session, grader)
        # Logged before the grading: a process that resumes the run grades the same bytes, although the agent's session
        # may be closed by then.
        return await journal.record_submission(
            submission.archive,
            body=body,
            failure=failure,
            files=submission.files,
            bytes=submission.bytes,
            refusal=submission.refusal,
            missing=submission.missing,
        )

    async def grade(self, tenant: str, grader: Grader, journal: Journal, submission: SubmissionTaken) -> GradingResult:
        """Grade a submission in a new sandbox. Raises OperatorError, ToolFailure: there is no reward, and neither
        agent nor grader is the cause.
        """
        if submission.refusal:
            return GradingResult(Grade(reward=0.0, refusal=submission.refusal, missing=submission.missing))
        # Checked against the logged hash: the archive itself is not signed.
        archive = await journal.load_artifacts(submission.sha256)
        artifacts = Submission(archive, submission.files, submission.bytes, missing=submission.missing)
        # Without network: the artifacts are hostile, and could send the solutions of the grader to the outside.
        spec = SessionSpec(workspace=grader.files, image=grader.image, network="none").with_defaults(grader.options)

        async def open_session() -> Session:
            # Close a session that the log may still name: that of the agent, that of a grading whose process died, or
            # one that was being opened.
            await self._sessions.abandon_last(tenant, journal)
            return await self._sessions.open(tenant, journal, spec)

        async def grade_once() -> GradingResult:
            began = time.monotonic()
            session = await retry_until_available(open_session)
            try:
                return await grade_submission(session, grader, artifacts, began)
            finally:
                # The process that continues the run abandons the session.
                if not is_being_cancelled():
                    await self._sessions.close(session)

        return await retry_grading(tenant, grade_once)


async def list_start_files(session: Session, grader: Grader) -> None:
    """List the files of the workspace before the agent begins, if the grader gets the files that change."""
    if not grader.artifacts:
        done = await _bash(session, _LIST_START)
        if done.returncode != 0:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"the files cannot be listed: {_end_of(done.stderr)}")


async def take_submission(session: Session, grader: Grader) -> Submission:
    """End the background jobs of the agent and take its artifacts. Raises OperatorError, ToolFailure."""
    try:
        # A job that still writes could show one file to the check and another one to the copy.
        await session.end_jobs()
        names, missing = await _list_names(session, grader)
        files = await _take_files(session, names)
    except _ArtifactsRefused as refusal:
        return Submission(refusal=str(refusal))
    except ToolFailure as error:
        # This is the agent's sandbox: an agent must not gain from breaking the programs that copy its artifacts.
        if error.code not in _ABOUT_FILES and not isinstance(error, SandboxProgramFailed):
            raise
        return Submission(refusal=error.message[:500])
    size = sum(len(content) for content, _ in files.values())
    return Submission(await in_tenant_thread(session.tenant, _pack, files), len(files), size, missing=missing)


async def retry_grading(tenant: str | None, grade: Callable[[], Awaitable[GradingResult]]) -> GradingResult:
    """Return the result of `grade`, which is repeated while the infrastructure fails. Raises its last error. `tenant`:
    the tenant that the log names.
    """
    for attempt in range(1, TRIES + 1):
        try:
            return await grade()
        except (OperatorError, ToolFailure) as error:
            is_quota = isinstance(error, ToolFailure) and error.code in QUOTA_CODES
            if judge_error(error).kind is not FailureKind.INFRASTRUCTURE or is_quota or attempt == TRIES:
                raise
            log.warning("grading_retried", tenant=tenant, error=str(error))
            await asyncio.sleep(RETRY_S)
    raise AssertionError("the last try returns or raises")


async def grade_submission(session: Session, grader: Grader, submission: Submission, began: float) -> GradingResult:
    """Grade a submission that was not refused, in a new session with the grader's files and image. `began`: the
    monotonic time at which the opening of the session began. Raises OperatorError, ToolFailure: there is no reward.
    """
    output = ""
    try:
        done, reward = await _run_command(session, grader, submission.archive)
        output = _end_of(done.stdout + done.stderr)
        scores = _judge(grader, done, reward)
    except (_GraderFailed, InvalidReward) as error:
        failure = Failure(kind=FailureKind.GRADER, code=GRADER_ERROR, message=f"{error}; fix the grader")
        return GradingResult(failure=failure, output=output)
    seconds = time.monotonic() - began
    grade = Grade(
        reward=scores.pop("reward"),
        scores=scores,
        files=submission.files,
        bytes=submission.bytes,
        seconds=seconds,
        missing=submission.missing,
    )
    return GradingResult(grade, output=output)


async def _take_files(session: Session, names: Sequence[str]) -> dict[str, tuple[bytes, bool]]:
    """Return the content of each artifact by its name, and whether it is executable. Raises _ArtifactsRefused."""
    if not names:
        return {}
    archive = await session.export_files(names)
    return await in_tenant_thread(session.tenant, _read_archive, archive, frozenset(names))


async def _list_names(session: Session, grader: Grader) -> tuple[list[str], tuple[str, ...]]:
    """Return the names of the regular files that the grader gets, and why other declared artifacts are missing. Raises
    _ArtifactsRefused: names or sizes break a limit.
    """
    if grader.artifacts:
        kinds = ["-type", "f", "-printf", _PRINT, "-o", "!", "-type", "d", "-printf", _PRINT_OTHER]
        argv = own_program("find", ".", "-xdev", *_selection(grader.artifacts), "(", *kinds, ")")
        done = await session.exec(argv, cwd="/workspace", timeout_s=LIST_TIMEOUT_S)
    else:
        done = await _bash(session, _LIST_CHANGED)
    if done.timed_out or done.truncated:
        raise _ArtifactsRefused(
            f"the workspace has too many files for a list of the artifacts: at most {MAX_FILES} are copied"
        )
    # A program of the session may have changed this list. The list is checked below, and again in the archive.
    if done.returncode not in (0, _UNREADABLE):
        raise _ArtifactsRefused(f"the files of the workspace cannot be listed: {_end_of(done.stderr)}")
    sizes, others = dict[str, int](), dict[str, str]()
    for entry in done.stdout.split(b"\0"):
        size, _, rest = entry.partition(b" ")
        name = os.fsdecode(rest.partition(b" ")[2])
        if name and (reason := _NO_FILE.get(size.decode("ascii", "replace"))) is not None:
            others[name] = reason
        elif name:
            # `int` of a very long number takes long. An unreadable size counts as too large.
            sizes[name] = int(size) if size.isdigit() and len(size) < 20 else MAX_BYTES + 1
    names, missing = sorted(sizes), tuple[str, ...]()
    if grader.artifacts:
        found = {**others, **sizes}
        matching, idle = await in_tenant_thread(session.tenant, choose_paths, found, grader.artifacts)
        names = [name for name in matching if name in sizes]
        skipped = [(name, others[name]) for name in matching if name not in sizes]
        missing = _describe_missing(idle, skipped)
    if len(names) > MAX_FILES:
        raise _ArtifactsRefused(
            f"{len(names)} files match the artifacts of the grader, and the limit is {MAX_FILES}: name fewer files"
        )
    _check_names(names)
    _check_size(sum(sizes[name] for name in names))
    return names, missing


def _describe_missing(unmatched: Sequence[str], skipped: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the first MAX_MISSING sentences about declared artifacts that are missing, in printable text."""
    sentences = CopiedFiles(unmatched=tuple(unmatched), skipped=tuple(skipped)).missing()
    return tuple(
        ascii(sentence)[1:-1] if not sentence.isprintable() else sentence for sentence in sentences[:MAX_MISSING]
    )


def _selection(patterns: Sequence[str]) -> list[str]:
    """Return the arguments for `find` that limit the search to the folders in which the patterns can match, so that the
    list stays short.
    """
    expression = list[str]()
    for pattern in patterns:
        parts = [part for part in pattern.removeprefix("/workspace").split("/") if part not in ("", ".")]
        wild = next((at for at, part in enumerate(parts) if _WILD.search(part)), len(parts))
        prefix = "/".join([".", *parts[:wild]]).replace("\\", "\\\\")
        expression += ["-o", "-path", prefix, "-o", "-path", f"{prefix}/*"]
    return ["(", *expression[1:], ")"]


def _check_names(names: Iterable[str]) -> None:
    """Raise _ArtifactsRefused for a name that a grader may misread."""
    for name in names:
        is_text = all(not 0xD800 <= ord(character) <= 0xDFFF for character in name)
        if not is_text or _NOT_PLAIN.search(name) or len(name.encode()) > MAX_NAME_BYTES:
            raise _ArtifactsRefused(f"the name of an artifact is not plain text in UTF-8: {name[:100]!a}")
        if name.startswith("/") or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise _ArtifactsRefused(f"the name of an artifact leads out of its folder: {name[:100]!a}")


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise _ArtifactsRefused(
            f"the artifacts of the grader have {size} bytes, and the limit is {MAX_BYTES}: name fewer files"
        )


def _read_archive(archive: bytes, names: frozenset[str]) -> dict[str, tuple[bytes, bool]]:
    """Return the files of an archive from the agent's sandbox. Raises _ArtifactsRefused: it has anything but these
    files.
    """
    files = dict[str, tuple[bytes, bool]]()
    stream = io.BytesIO(archive)
    try:
        for entry in read_tar(stream, 2 * MAX_FILES + 1):
            # A link could lead to a file of the grader when the archive is unpacked there.
            if entry.kind != "file" or entry.name not in names or entry.name in files:
                raise _ArtifactsRefused(
                    f"an artifact is not a regular file, or changed while it was read: {entry.name[:100]!a}"
                )
            files[entry.name] = entry.read(stream), entry.is_executable
    except ValueError as error:
        raise _ArtifactsRefused(f"the artifacts cannot be read: {error}") from error
    # If a file has the same name as a folder of another file, the result of unpacking both depends on the program.
    if files.keys() != names or any(str(above) in names for name in names for above in Path(name).parents):
        raise _ArtifactsRefused("the artifacts changed while they were read")
    _check_size(sum(len(content) for content, _ in files.values()))
    return files


def _pack(files: Mapping[str, tuple[bytes, bool]]) -> bytes:
    """Return a new archive of these files. No header of the agent's archive is in it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, (content, is_executable) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755 if is_executable else 0o644
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


async def _run_command(session: Session, grader: Grader, archive: bytes) -> tuple[ExecResult, bytes | None]:
    """Run the command of the grader. Return its end and the content of the reward file; None if there is none.

    Raises SandboxUnavailable: the sandbox was replaced during the command, so that files may be missing, or another
    process has ended the command. Raises _GraderFailed.
    """
    # Read the id of the sandbox after the import. If a new sandbox replaces this one, it lacks the artifacts, and the
    # grader could take that for a failure of the agent.
    await session.import_archive(archive, ARTIFACTS_FOLDER)
    sandbox, failed = await _identify(session), None
    try:
        done, content = await _execute(session, grader)
    except SandboxProgramFailed as error:
        # The grader, or the artifacts that it runs, have stopped the sandbox's own programs. No retry helps.
        failed = error
    if await _identify(session) != sandbox:
        raise SandboxUnavailable("the sandbox of the grader was lost while its command ran: retry the item")
    if failed is not None:
        raise _GraderFailed(f"the grader, or the artifacts that it runs, broke its sandbox ({failed.message[:500]})")
    # Check this before the reward is used: a command that was ended may have written only a part of it.
    if done.cancelled:
        raise SandboxUnavailable("the command of the grader was cancelled: retry the item")
    return done, content


async def _execute(session: Session, grader: Grader) -> tuple[ExecResult, bytes | None]:
    """Run the command, and read the reward file. Raises SandboxProgramFailed, and the errors of the infrastructure."""
    argv, env = ["bash", "-c", grader.command], {"ARTIFACTS": ARTIFACTS_FOLDER}
    done = await session.exec(argv, env=env, cwd="/workspace", timeout_s=grader.timeout_s)
    content: bytes | None = None
    if grader.reward_file is not None:
        try:
            content = await session.read_file(grader.reward_file)
        except ToolFailure as error:
            if error.code not in _ABOUT_FILES:
                raise
    return done, content


def _judge(grader: Grader, done: ExecResult, reward: bytes | None) -> dict[str, float]:
    """Return the scores of a command that has ended, with `reward`. Raises _GraderFailed, InvalidReward."""
    if done.timed_out:
        raise _GraderFailed(f"the grader did not end within {grader.timeout_s:g} s")
    if grader.reward_file is None:
        if done.returncode == 0:
            return {"reward": 1.0}
        # 126 and 127 mean that bash could not run a command; higher codes mean that a signal ended a command.
        if 0 < done.returncode < 126:
            return {"reward": 0.0}
        raise _GraderFailed(f"the grader ended with exit code {done.returncode}")
    if done.returncode != 0:
        raise _GraderFailed(f"the grader ended with exit code {done.returncode}, so its reward file does not count")
    if reward is None:
        raise _GraderFailed(f"the grader wrote no file {grader.reward_file} that can be read")
    return parse_reward(reward)


async def _identify(session: Session) -> tuple[str, int] | None:
    sandbox = (await session.info()).sandbox
    return (sandbox.id, sandbox.generation) if sandbox is not None else None


async def _bash(session: Session, script: str) -> ExecResult:
    argv = own_program("bash", "-c", script, "list", _START_LIST, _SELECT_NEW)
    return await session.exec(argv, cwd="/workspace", timeout_s=LIST_TIMEOUT_S)


def _end_of(output: bytes) -> str:
    """Return the end of a program's output as text."""
    return output[-4 * MAX_OUTPUT_CHARS :].decode("utf-8", "replace").strip()[-MAX_OUTPUT_CHARS:]
