"""Secrets, API keys, hosts and approvals as the API and the CLI show them."""

import time
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from toolcrew.contract.access_views import KeyView
from toolcrew.contract.clock import Instant
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.hosts import HostReport
from toolcrew.contract.run_views import RunView
from toolcrew.contract.secrets import SecretInfo
from toolcrew.contract.session_spec import LargestOptions
from toolcrew.store.api_keys import ApiKeyRecord
from toolcrew.store.approvals import PendingQuestion
from toolcrew.store.run_records import DurableRun


class SecretView(BaseModel):
    """A secret without its value. `hosts`: hosts that sandboxes may send it to. `place`: the part of a request that
    contains the secret. `state`: `valid`, or why it is not used. `revision`: grows with each change. Times are in
    ISO 8601.
    """

    name: str
    hosts: list[str] = Field(default_factory=list)
    place: str = ""
    revision: int = 0
    created_at: Instant | None = None
    changed_at: Instant | None = None
    state: str


class HostView(BaseModel):
    """A live worker. `kind`: sandbox or web. `slots`: calls that it runs at the same time. `busy`: calls that run now.
    `store`: where its checkpoints are stored. `problem`: why it is not healthy. Sizes are in bytes, times in ISO 8601.

    `largest`: for each class, the largest options that a session may request. `egress_classes`: classes whose sessions
    may have network egress.
    `images`: names and patterns that sessions may use. `images_present`: images that the host may pull and already has.
    `waiting`: numbers of calls in the worker's queue and in the queues of the pools that it serves.
    """

    host: str
    kind: str
    state: str
    queue: str
    worker: str
    release: str
    pools: list[str]
    slots: int
    busy: int
    sessions: int
    max_sessions: int
    sandboxes: int
    max_sandboxes: int
    memory_free_bytes: int
    disk_free_bytes: int
    classes: list[str]
    largest: dict[str, LargestOptions] = {}
    egress_classes: list[str] = []
    images: list[str]
    images_present: list[str] = []
    store: str
    healthy: bool
    draining: bool
    problem: str
    started_at: Instant
    reported_at: Instant
    waiting: dict[str, int]


class ApprovalView(BaseModel):
    """A call that waits for a decision.

    `arguments`: the exact arguments of the call. `command`: the shell command, if the tool has one. `warning`: why the
    call is dangerous, "" for other calls. `digest`: the digest of the call, which a decision must contain. Times are in
    ISO 8601. A decision after `expires_at` has no effect.
    """

    id: str
    tenant: str
    session: str | None
    run: str
    call_id: str
    tool: str
    arguments: dict[str, Any]
    command: str | None
    reason: str
    warning: str
    digest: str
    created_at: Instant
    expires_at: Instant


def view_secret(name: str, info: SecretInfo | ConfigError) -> SecretView:
    """Return the view of a secret, or of a record that cannot be read."""
    if isinstance(info, ConfigError):
        return SecretView(name=name, state=str(info))
    return SecretView.model_validate({**info.model_dump(include=set(SecretView.model_fields)), "state": "valid"})


def view_key(key_id: str, key: ApiKeyRecord | ConfigError) -> KeyView:
    """Return the view of an API key, or of a record that cannot be read."""
    if isinstance(key, ConfigError):
        return KeyView(id=key_id, state=str(key))
    is_over = key.expires_at is not None and key.expires_at <= time.time()
    fields = key.model_dump(include=set(KeyView.model_fields))
    return KeyView(id=key_id, **fields, state="expired" if is_over else "valid")


def view_host(report: HostReport, waiting: Mapping[str, int]) -> HostView:
    """Return the view of a worker. `waiting`: numbers of calls by queue."""
    fields = report.model_dump(include=set(HostView.model_fields))
    queues = {queue: waiting.get(queue, 0) for queue in (report.queue, *report.pools)}
    return HostView.model_validate({**fields, "state": report.state, "waiting": queues})


def view_approval(pending: PendingQuestion) -> ApprovalView:
    """Return the view of an open question."""
    question = pending.question
    fields = question.model_dump(include=set(ApprovalView.model_fields))
    return ApprovalView(
        **fields,
        call_id=question.call.id,
        tool=question.call.name,
        arguments=dict(question.call.arguments),
        created_at=pending.created_at,
        expires_at=pending.expires_at,
    )


def view_run(run: DurableRun) -> RunView:
    """Build the view of a run for clients."""
    fields = run.model_dump(include=set(RunView.model_fields))
    end = run.end.model_dump(exclude={"failure": True, "usage": {"cost"}}) if run.end is not None else {}
    return RunView(**fields, **end, failure=run.end.failure if run.end is not None else None)
