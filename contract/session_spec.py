"""The fields of a new session, with their rules: the only place where an option of a session stands.

Every request that opens a session inherits from these records: of the HTTP API, a line of a batch, the call
`session.open`, the request to sandboxd. The options of the CLI are made from their fields.
"""

from collections.abc import Sized
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from toolcrew.contract.calls import LONGEST_TIMEOUT_S, MAX_TIMEOUT_S, Identifier, Record, pick_fields
from toolcrew.contract.image_names import ImageText
from toolcrew.contract.secrets import MAX_SECRETS, SecretName
from toolcrew.contract.tool_configs import ToolConfig

MIB = 1024 * 1024
MIN_MEMORY_BYTES = 224 * MIB
"""Minimum memory of a sandbox: 160 MiB for /output and /dev/shm, which are in memory, and 64 MiB for programs."""
Cpus = Annotated[float, Field(ge=0.01, le=4096)]
Pids = Annotated[int, Field(ge=16, le=2**22)]
WorkspaceBytes = Annotated[int, Field(ge=MIB, le=2**50)]
SandboxUser = Literal["sandbox", "root"]
NetworkPolicy = Literal["none", "egress"]
PreviewAccess = Literal["none", "token", "public"]
Hostname = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?$")]
"""A label of RFC 1123."""
DEFAULT_HOSTNAME = "sandbox"
DEFAULT_TTL_S, MAX_TTL_S = 1800.0, 86_400.0
"""Seconds without a call after which a session is closed: the default, and the maximum."""
TtlS = Annotated[float, Field(gt=0, le=MAX_TTL_S)]
WorkspaceName = Annotated[str, Field(min_length=1, max_length=4096)]
"""A file of the store (contract/file_ids.py), or a path on the machine of the orchestrator."""
CHECKPOINT_PATTERN = "^[A-Za-z0-9_-]{1,64}$"
CheckpointId = Annotated[str, Field(pattern=CHECKPOINT_PATTERN)]
"""The id of a checkpoint in a request, a line of a batch or a call."""


def _is_none(value: object) -> bool:
    return value is None


def _is_empty(value: Sized) -> bool:
    return not value


class SandboxOptions(Record):
    """Sizes, user and secrets of a sandbox. None: the value of the tenant class. Sizes are in bytes. JSON omits fields
    that are None, and empty `secrets`, so that earlier releases can read the record.
    """

    cpus: Cpus | None = Field(default=None, exclude_if=_is_none, description="Processors.")
    memory_bytes: Annotated[int, Field(ge=MIN_MEMORY_BYTES, le=2**50)] | None = Field(
        default=None,
        exclude_if=_is_none,
        description="Memory of all processes, with /output and /dev/shm. A workspace in memory is added.",
    )
    workspace_bytes: WorkspaceBytes | None = Field(
        default=None, exclude_if=_is_none, description="Disk for all files that the session writes."
    )
    pids: Pids | None = Field(default=None, exclude_if=_is_none, description="Processes and threads.")
    user: SandboxUser | None = Field(
        default=None, exclude_if=_is_none, description="User of the programs; `root` is root of the sandbox only."
    )
    hostname: Hostname | None = Field(
        default=None, exclude_if=_is_none, description=f"Host name of the sandbox. Default: {DEFAULT_HOSTNAME}."
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


class SessionOptions(SandboxOptions):
    """The options of a new session that every client may set, with the options of its sandbox."""

    image: ImageText | None = Field(
        default=None,
        exclude_if=_is_none,
        description="An image that the tenant may use. Default: the image of its class.",
    )
    network: NetworkPolicy | None = Field(
        default=None,
        exclude_if=_is_none,
        description="egress: reach the hosts that the operator allows. Default: the network of the tenant's class.",
    )
    restore: CheckpointId | None = Field(
        default=None, exclude_if=_is_none, description="Start with the files of this checkpoint id."
    )
    tool_config: ToolConfig = Field(
        default_factory=dict, exclude_if=_is_empty, description="What tools read as their configuration."
    )


class SessionSpec(SessionOptions):
    """A new session. `workspace`: its first files. `fork`: an open session of the tenant, which is forked; the other
    fields are then not used. `ttl_s`: seconds without a call after which the session is closed.
    """

    workspace: WorkspaceName | None = Field(
        default=None,
        exclude_if=_is_none,
        description="Start with these files: a folder, an archive (tar, tar.gz, ..., zip) or a git bundle.",
    )
    fork: Identifier | None = Field(default=None, exclude_if=_is_none)
    ttl_s: TtlS = Field(default=DEFAULT_TTL_S, exclude_if=lambda ttl_s: ttl_s == DEFAULT_TTL_S)

    def __hash__(self) -> int:
        """Return a hash that leaves out `tool_config`, which is not hashable. Equal records have equal hashes."""
        return hash(tuple(getattr(self, name) for name in type(self).model_fields if name != "tool_config"))

    def with_defaults(self, options: SandboxOptions) -> Self:
        """Return a copy with the values of `options` for options of the sandbox that are not set here."""
        return self.model_copy(update=options.model_dump() | pick_options(self).model_dump())

    def host_arguments(self) -> dict[str, Any]:
        """Return the fields that the host of the session gets: the arguments of `session.open`."""
        return self.model_dump(mode="json", include=HOST_FIELDS)


def _parse_instant(value: object) -> datetime:
    """Return the time in UTC. Raises ValueError: no time in ISO 8601."""
    if isinstance(value, datetime):
        return value
    try:
        return datetime.fromisoformat(value if isinstance(value, str) else "").astimezone(UTC)
    except OverflowError as error:
        raise ValueError(str(error)) from error


InstantText = Annotated[
    datetime,
    BeforeValidator(_parse_instant),
    PlainSerializer(lambda at: at.isoformat(timespec="seconds"), when_used="json-unless-none"),
    WithJsonSchema({"type": "string", "maxLength": 64}),
]


class SessionMove(Record):
    """The move of a session from another host. `generation`: the number of the session's new opening, and of its new
    sandbox. `checkpoint_at`: the time of the restored checkpoint; None if unknown. `is_planned`: the other host was
    drained, not lost.
    """

    generation: Annotated[int, Field(strict=True, ge=1, le=2**53)]
    checkpoint_at: InstantText | None = None
    is_planned: Annotated[bool, Field(strict=True)] = False


HOST_FIELDS = SessionSpec.model_fields.keys() - {"fork", "tool_config"}
EMPTY_SESSION = SessionSpec()
