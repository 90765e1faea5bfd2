"""Sessions, their files and what tenants used, as the HTTP API returns them."""

import base64
import binascii
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, PlainSerializer, WithJsonSchema

from toolcrew.contract.calls import ExecResult, Record
from toolcrew.contract.clock import Instant
from toolcrew.contract.session_spec import SandboxOptions

By = Literal["hour", "day"]
WARN_SHARE: Final = 0.8
"""Share of a budget, 0 to 1. When a tenant has used this share, a notice says that the budget is nearly used up."""


class BudgetState(Record):
    """A budget of the tenant's policy. `name`: its field in the policy, such as cpu_s_per_day. `used`: the amount used
    since the last reset. `resets_at`: the time of the next reset, in ISO 8601.
    """

    name: str
    limit: float
    used: float
    is_used_up: bool
    resets_at: Instant

    @property
    def is_nearly_used_up(self) -> bool:
        return self.used >= WARN_SHARE * self.limit


class UsageAmounts(BaseModel):
    """Used resources. `calls`: number of calls with a result. `cpu_s`: CPU seconds of calls, background jobs and starts
    of sandboxes. `sandbox_s`: seconds in which sessions had a container. `read_bytes`, `written_bytes`: bytes from and
    to disks, without the kernel's cache and files in memory. `network_bytes`: bytes through the egress proxy, in both
    directions. `cost`: cost of model replies in the currency of the models' prices; replies without token counts do not
    count. `stored_bytes`: bytes of new checkpoints (including automatic ones), artifacts and uploads, minus the bytes
    of deleted ones. The number may be negative. Files that expire are not subtracted. `stream_bytes`: bytes of streams
    between the host and sandboxes, in both directions.
    """

    calls: int = 0
    cpu_s: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    network_bytes: int = 0
    sandbox_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost: float = 0.0
    stored_bytes: int = 0
    stream_bytes: int = 0


class UsagePeriod(UsageAmounts):
    """Used resources of the hour or day that begins at `start`, in ISO 8601."""

    start: str


class UsageReport(BaseModel):
    """Usage of a tenant. `data`: periods with use, the oldest first. `total`: their sum. `budgets`: their current
    state.
    """

    tenant: str
    by: By
    data: list[UsagePeriod]
    total: UsageAmounts
    budgets: list[BudgetState]


def encode(data: bytes) -> str:
    """Return the bytes in base64 with the standard alphabet."""
    return base64.b64encode(data).decode("ascii")


def _decode(text: object) -> object:
    if not isinstance(text, str):
        return text
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("this is not base64: encode the bytes with the standard alphabet and padding") from None


Base64 = Annotated[
    bytes,
    BeforeValidator(_decode),
    PlainSerializer(encode, when_used="json"),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]
"""Bytes, which JSON contains in base64 with the standard alphabet."""


class ExecView(ExecResult):
    """The result of a program. `returncode`: -N if signal N ended the program. `stdout`, `stderr`: at most 4 MiB
    each, in base64. `truncated`: there was more output. `timed_out`: the program was killed at its limit.
    """

    stdout: Base64
    stderr: Base64


class Checkpoint(Record):
    """Files, shell state and outputs of a session at one moment. `skipped`: number of sockets, which are not stored.
    `files_changed`: whether files changed while they were read.
    """

    id: str
    bytes: int
    sha256: str
    skipped: int = 0
    files_changed: bool = False


class SessionView(SandboxOptions):
    """An open session with the sizes and the user of its sandbox. `hosts`: the hosts that the session can reach with
    network egress. `timeout_s`: the largest limit of a call.

    `sandbox`: the id of the session's container, "" while the id is not known. `generation`: grows when the session
    gets another sandbox. `network`: none or egress. `usage`: what the session used so far, as in GET
    /v1/tenants/{name}/usage; null in the response that opens the session.
    """

    id: str
    tenant: str
    host: str
    image: str
    network: str
    hosts: list[str]
    sandbox: str
    generation: int
    timeout_s: float
    usage: UsageAmounts | None = None


class PreviewView(BaseModel):
    """The address of a port. `access`: token or public. `url`: the address; with token, it contains a ticket. Whoever
    has the address can use the port until `expires_at`, in Unix seconds.
    """

    url: str
    access: Literal["token", "public"]
    expires_at: float


class Forks(BaseModel):
    """The new sessions of a fork."""

    sessions: list[SessionView]


class WrittenFile(BaseModel):
    """A written file. `path`: the path in the request. `bytes`: the size of the file."""

    path: str
    bytes: int


class OpenSession(Record):
    """An open session. `state`: open, or moving to another host; `host` and `queue` are then empty. `image` and
    `network` null: the session uses those of its tenant's class. `fence`: a number that grows with each move.
    `checkpoint`: the id of the last checkpoint, taken at `checkpoint_at`. Times are in ISO 8601.
    """

    id: str
    tenant: str
    state: str
    host: str
    queue: str
    fence: int
    image: str | None
    network: str | None
    opened_at: Instant | None
    ttl_s: float
    checkpoint: str | None
    checkpoint_at: Instant | None


class StoredFile(Record):
    """A file. `id`: starts with `file-` for an upload and with `artifacts-` for artifacts. At `expires_at` the store
    deletes it. Times are in ISO 8601.
    """

    id: str
    bytes: int
    sha256: str
    created_at: Instant
    expires_at: Instant
