"""The attestation: a guest's report about the state of its sandbox. It is checked before a session gets the sandbox."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from toolcrew.contract.errors import SandboxUnavailable

_MAX_VALUE = 2**63
_KIND = re.compile(r"[a-z0-9_.?-]{1,40}")
_FOLDERS = ("workspace", "tmp", "output", "shm")
_NAMES = {"workspace": "/workspace", "tmp": "/tmp", "output": "/output", "shm": "/dev/shm"}
# The tables of a file system use a part of its image.
_LEAST_SHARE = 0.7


@dataclass(frozen=True)
class Attestation:
    """Report of a guest. `processes`: number of living processes except PID 1 and its waiting supervisor. `jobs`:
    number of running background jobs and processes of streams. `entries`: folder -> number of its direct entries,
    counted up to 1,000. `workspace_bytes` and `workspace_inodes`: total size of the file system. 0 inodes: the file
    system has no fixed number.
    """

    processes: int
    zombies: int
    jobs: int
    entries: Mapping[str, int]
    workspace_bytes: int
    workspace_inodes: int
    workspace_type: str


class AttestingGuest(Protocol):
    """Interface of a sandbox whose guest can be asked for its report (attestation)."""

    async def ask(self, request: Mapping[str, Any], /) -> Mapping[str, Any]: ...


async def ask_attestation(guest: AttestingGuest, timeout_s: float = 5.0) -> Attestation:
    """Return the guest's current report. Raises SandboxUnavailable when the report is missing or invalid."""
    try:
        return parse_attestation(await guest.ask({"op": "attest", "timeout_s": timeout_s}))
    except ValueError as error:
        raise SandboxUnavailable(
            f"the guest sent no valid report about its sandbox ({error}): build its image again"
        ) from error


def parse_attestation(done: Mapping[str, Any]) -> Attestation:
    """Parse the guest's answer to the request `attest`. Raises ValueError when the answer is an error or violates the
    protocol.
    """
    if "error" in done:
        raise ValueError(f"it failed: {str(done['error'])[:300]}")
    entries, workspace = _mapping(done, "entries"), _mapping(done, "workspace")
    kind = workspace.get("type")
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise ValueError("'type' of the workspace is not the name of a file system")
    return Attestation(
        processes=_count(done, "processes"),
        zombies=_count(done, "zombies"),
        jobs=_count(done, "jobs"),
        entries={name: _count(entries, name) for name in _FOLDERS},
        workspace_bytes=_count(workspace, "bytes"),
        workspace_inodes=_count(workspace, "inodes"),
        workspace_type=kind,
    )


def find_dirt(attestation: Attestation) -> list[str]:
    """Return a sentence for each trace of use; none for a sandbox that was never used."""
    counts = [
        (attestation.processes, "process(es) run in addition to the guest"),
        (attestation.zombies, "dead process(es) wait to be collected"),
        (attestation.jobs, "background job(s) run"),
        *((attestation.entries[name], f"entries lie in {_NAMES[name]}") for name in _FOLDERS),
    ]
    return [f"{count} {noun}" for count, noun in counts if count]


def find_misfits(attestation: Attestation, size_bytes: int, inodes: int) -> list[str]:
    """Return a sentence for each difference from the requested workspace with a hard quota; none when the workspace
    matches.
    """
    return [
        *_compare("bytes", attestation.workspace_bytes, size_bytes, attestation.workspace_type),
        *_compare("inodes", attestation.workspace_inodes, inodes, attestation.workspace_type),
    ]


def _compare(unit: str, actual: int, requested: int, kind: str) -> Iterator[str]:
    # Allow for rounding: a kernel rounds up to whole pages or groups of inodes.
    if actual > requested * 1.1 + 65_536:
        yield f"/workspace ({kind}) has {actual} {unit}, more than the {requested} requested: its quota is not in force"
    elif actual < requested * _LEAST_SHARE and (unit == "bytes" or actual):
        yield f"/workspace ({kind}) has {actual} {unit}, fewer than the {requested} requested"


def _mapping(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"'{name}' is missing or is not an object")
    return value


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value < _MAX_VALUE:
        raise ValueError(f"'{name}' is missing or is not a count")
    return value
