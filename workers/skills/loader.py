"""Loads skills from an operator's folders. Each folder with a SKILL.md in one of the roots is a skill."""

import contextlib
import io
import os
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import structlog

from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.skill_sidecars import (
    MAX_SIDECAR_BYTES,
    SIDECAR_FILE,
    Sidecar,
    SidecarBroken,
    build_skill_spec,
    describe_broken_sidecar,
    parse_sidecar,
)
from toolcrew.contract.skills import (
    MAX_SKILL_FILE_BYTES,
    OMITTED_FOLDERS,
    SKILL_FILE,
    BundleDigest,
    BundleFile,
    SkillBroken,
    build_summary,
    check_bundle,
    parse_skill,
)
from toolcrew.contract.specs import MAX_SKILLS, SkillSummary, ToolSpec
from toolcrew.workers.foreign_schemas import SchemaRefused, bound_schema
from toolcrew.workers.skills.sources import FolderSource, SkillSource

log = structlog.get_logger(__name__)

MAX_DEPTH = 32
"""Maximum depth of folders within a skill's folder."""
_MEMORY_BYTES = 1024 * 1024


@dataclass(frozen=True)
class SkillTool:
    """The tool that a skill becomes by its sidecar (the file that defines a tool's name and arguments)."""

    sidecar: Sidecar
    spec: ToolSpec


@dataclass(frozen=True)
class Skill:
    """A loaded skill.

    - `files`: the files by path. Their content is read from the source when it is needed.
    - `tool`: the tool of its sidecar; None without a sidecar.
    - `owner`: the tenant that the skill is installed for; "" for all tenants.
    - `place`: the folder in the sandbox, for a skill that a session has in its own workspace; None for a skill that
      must be copied into sandboxes.
    """

    source: SkillSource
    summary: SkillSummary
    body: str
    files: tuple[BundleFile, ...]
    tool: SkillTool | None = None
    owner: str = ""
    place: str | None = None

    @property
    def name(self) -> str:
        return self.summary.name

    def find(self, path: str) -> BundleFile | None:
        """Return the file with exactly that path."""
        return next((file for file in self.files if file.path == path), None)


def load_skills(roots: Sequence[Path]) -> tuple[Skill, ...]:
    """Return all usable skills by name. If two skills have the same name, the skill of the first root is used.

    A broken skill is logged and does not affect other skills. Raises ConfigError: a root is no folder.
    """
    found: dict[str, Skill] = {}
    for root in roots:
        for folder in _skill_folders(root):
            try:
                skill = load_skill(folder)
            except (SkillBroken, OSError) as error:
                log.error("skill_not_loaded", folder=str(folder), error=str(error))
                continue
            if skill.name in found:
                log.warning("skill_shadowed", skill=skill.name, folder=str(folder), by=str(found[skill.name].source))
            elif len(found) == MAX_SKILLS:
                log.error(
                    "skill_not_loaded",
                    folder=str(folder),
                    error=f"the worker has {MAX_SKILLS} skills: remove some",
                )
            else:
                found[skill.name] = skill
                if skill.summary.warnings:
                    log.warning(
                        "skill_has_faults", skill=skill.name, folder=str(folder), warnings=list(skill.summary.warnings)
                    )
    return tuple(sorted(found.values(), key=lambda skill: skill.name))


def load_skill(folder: Path, owner: str = "") -> Skill:
    """Return the skill of one folder. Raises SkillBroken, OSError."""
    if (folder / SKILL_FILE).stat().st_size > MAX_SKILL_FILE_BYTES:
        raise SkillBroken(f"its {SKILL_FILE} is larger than {MAX_SKILL_FILE_BYTES} bytes: move text into other files")
    # Check the list of files before their content is read: a link may lead out of the folder, and the files may be very
    # large.
    return load_files(FolderSource(folder), folder.name, _checked_files(folder), owner)


def load_files(source: SkillSource, folder: str, found: Iterable[BundleFile], owner: str = "") -> Skill:
    """Return the skill that consists of these files. `folder` is the name of their folder. Raises SkillBroken,
    OSError.
    """
    files = tuple(sorted(found, key=lambda file: file.path))
    warnings = check_bundle(files)
    try:
        # Limit the read: the file may have grown since its size was checked.
        raw_text = source.read(SKILL_FILE, MAX_SKILL_FILE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise SkillBroken(f"its {SKILL_FILE} is not UTF-8 (byte {error.start}): save it as UTF-8") from error
    text = parse_skill(raw_text, folder)
    digest = BundleDigest()
    for file in files:
        digest.add(file.path, source.read(file.path), is_executable=file.is_executable)
    summary = build_summary(text, files, digest.hexdigest(), warnings)
    try:
        return Skill(source, summary, text.body, files, _read_tool(source, summary, files, owner), owner)
    except SidecarBroken as error:
        summary = build_summary(text, files, digest.hexdigest(), [*warnings, describe_broken_sidecar(error)])
        return Skill(source, summary, text.body, files, None, owner)


def _read_tool(source: SkillSource, skill: SkillSummary, files: Sequence[BundleFile], owner: str) -> SkillTool | None:
    """Return the tool of the skill's sidecar; None without a sidecar. Raises SidecarBroken, OSError."""
    paths = {file.path for file in files}
    if SIDECAR_FILE not in paths:
        return None
    sidecar = parse_sidecar(source.read(SIDECAR_FILE, MAX_SIDECAR_BYTES + 1), paths)
    spec = build_skill_spec(skill, sidecar)
    return SkillTool(sidecar, _bound(spec) if owner else spec)


def _bound(spec: ToolSpec) -> ToolSpec:
    """Return the tool with a schema of limited cost. Processes that serve all tenants check arguments against a
    tenant's schema.

    Raises SidecarBroken.
    """
    try:
        return spec.model_copy(update={"parameters": bound_schema(spec.parameters), "is_installed_skill": True})
    except SchemaRefused as refused:
        raise SidecarBroken(str(refused)) from None


def pack_skill(skill: Skill, memory_bytes: int = _MEMORY_BYTES) -> IO[bytes]:
    """Return the skill's files as a tar archive, which the caller closes.

    An archive larger than `memory_bytes` is stored on disk.

    Raises ToolFailure(STALE_FILE): the files have changed since they were loaded.
    """
    digest = BundleDigest()
    with contextlib.ExitStack() as stack:
        packed = stack.enter_context(tempfile.SpooledTemporaryFile(memory_bytes))
        try:
            with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
                for file in skill.files:
                    data = _read_as_loaded(skill, file)
                    digest.add(file.path, data, is_executable=file.is_executable)
                    entry = tarfile.TarInfo(file.path)
                    entry.size, entry.mode = len(data), 0o755 if file.is_executable else 0o644
                    archive.addfile(entry, io.BytesIO(data))
        except OSError as error:
            raise _build_changed_error(skill) from error
        if digest.hexdigest() != skill.summary.digest:
            raise _build_changed_error(skill)
        packed.seek(0)
        stack.pop_all()
    return packed


def _read_as_loaded(skill: Skill, file: BundleFile) -> bytes:
    """Return the bytes of the file. A file that has grown is not read to its end."""
    data = skill.source.read(file.path, file.size + 1)
    if len(data) != file.size:
        raise _build_changed_error(skill)
    return data


def read_bundled(skill: Skill, file: BundleFile, at_most: int | None = None) -> bytes:
    """Return the bytes of a file of the skill, at most `at_most`.

    Raises ToolFailure(STALE_FILE): the file is missing or has another size.
    """
    try:
        return _read_as_loaded(skill, file) if at_most is None else skill.source.read(file.path, at_most)
    except OSError as error:
        raise _build_changed_error(skill) from error


def _build_changed_error(skill: Skill) -> ToolFailure:
    return ToolFailure(
        ErrorCode.STALE_FILE,
        f"the files of the skill {skill.name} have changed since the worker loaded them: ask the operator to restart "
        f"the worker",
    )


def _skill_folders(root: Path) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError as error:
        raise ConfigError(
            f"the folder {root} in TOOLCREW_SKILLS cannot be read ({error.strerror}): create it, or remove it from the "
            "setting"
        ) from error
    for entry in entries:
        if entry.is_dir() and os.path.isfile(os.path.join(entry.path, SKILL_FILE)):
            yield Path(entry.path)


def _checked_files(folder: Path) -> Iterator[BundleFile]:
    """Return the files of the folder after checks. The scan stops when they exceed the limits of a skill."""
    found: list[BundleFile] = []
    for file in _scan(str(folder)):
        found.append(file)
        if file.leads_out or len(found) % 500 == 0:
            check_bundle(found)
        yield file


def _scan(folder: str) -> Iterator[BundleFile]:
    root, pending = os.path.realpath(folder), [("", 0)]
    while pending:
        prefix, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise SkillBroken(f"its folders are nested more than {MAX_DEPTH} deep: put {prefix[:200]} higher")
        with os.scandir(os.path.join(folder, prefix)) as entries:
            for entry in entries:
                path = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in OMITTED_FOLDERS:
                        pending.append((f"{path}/", depth + 1))
                elif (file := _look_at(entry, path, root)) is not None:
                    yield file


def _look_at(entry: "os.DirEntry[str]", path: str, root: str) -> BundleFile | None:
    """Return the file of a folder entry; None when the entry is not part of the skill.

    A link to a folder of the skill adds nothing, and a link to its parents would never end.
    """
    if entry.is_symlink():
        target = os.path.realpath(entry.path)
        # A link that leads out of the skill's folder could copy any file of this host into a sandbox. `check_bundle`
        # refuses it.
        if os.path.commonpath((target, root)) != root:
            return BundleFile(path, 0, False, b"", leads_out=True)
    if not os.path.isfile(entry.path):
        return None
    facts = entry.stat()
    with open(entry.path, "rb") as file:
        return BundleFile(path, facts.st_size, bool(facts.st_mode & 0o100), file.read(2))
