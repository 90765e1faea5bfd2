"""The options that a session may set for its sandbox, within the limits of its tenant class."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from toolcrew.contract.calls import LONGEST_TIMEOUT_S, MAX_TIMEOUT_S, Record, pick_fields
from toolcrew.contract.secrets import MAX_SECRETS, SecretName

MIB = 1024 * 1024
MIN_MEMORY_BYTES = 224 * MIB
"""Minimum memory of a sandbox: 160 MiB for /tmp, /output and /dev/shm, which are in memory, and 64 MiB for programs."""
Cpus = Annotated[float, Field(ge=0.01, le=4096)]
Pids = Annotated[int, Field(ge=16, le=2**22)]
WorkspaceBytes = Annotated[int, Field(ge=MIB, le=2**50)]
SandboxUser = Literal["sandbox", "root"]
CHECKPOINT_PATTERN = "^[A-Za-z0-9_-]{1,64}$"
CheckpointId = Annotated[str, Field(pattern=CHECKPOINT_PATTERN)]
"""The id of a checkpoint in a request, a line of a batch or a call."""


def _is_none(value: object) -> bool:
    return value is None


def _is_empty(names: Sequence[str]) -> bool:
    return not names


class SandboxOptions(Record):
    """Sizes, user and secrets of a sandbox. None: the value of the tenant class. Sizes are in bytes. JSON omits fields
    that are None, and empty `secrets`, so that earlier releases can read the record.
    """

    cpus: Cpus | None = Field(default=None, exclude_if=_is_none, description="Processors.")
    memory_bytes: Annotated[int, Field(ge=MIN_MEMORY_BYTES, le=2**50)] | None = Field(
        default=None,
        exclude_if=_is_none,
        description="Memory of all processes, with /tmp, /output and /dev/shm. A workspace in memory is added.",
    )
    workspace_bytes: WorkspaceBytes | None = Field(
        default=None, exclude_if=_is_none, description="Disk for all files that the session writes."
    )
    pids: Pids | None = Field(default=None, exclude_if=_is_none, description="Processes and threads.")
    user: SandboxUser | None = Field(
        default=None, exclude_if=_is_none, description="User of the programs; `root` is root of the sandbox only."
    )
    secrets: Annotated[tuple[SecretName, ...], Field(max_length=MAX_SECRETS)] = Field(
        default=(),
        exclude_if=_is_empty,
        # A strict subclass, such as a batch line, receives parsed JSON, which has lists and no tuples.
        strict=False,
        description="Names of secrets that programs may use without reading them.",
    )


class LargestOptions(SandboxOptions):
    """The largest values that a session may request. null: the value of the class is the largest. `user` root:
    the session may choose either user. `timeout_s`: the largest time limit of a call, in seconds.
    """

    timeout_s: float = Field(default=MAX_TIMEOUT_S, ge=MAX_TIMEOUT_S, le=LONGEST_TIMEOUT_S)


DEFAULT_OPTIONS = SandboxOptions()


def pick_options(record: SandboxOptions) -> SandboxOptions:
    """Return a copy of the record as SandboxOptions, without the fields that a subclass adds."""
    return pick_fields(SandboxOptions, record)
