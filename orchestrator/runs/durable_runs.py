"""Runs that programs start, follow, list, cancel and read. Any orchestrator can execute such a run: all state is in
Redis.
"""

import hashlib
import json
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from pydantic import ValidationError

from toolcrew.concurrency.read_memory import PARSED_LOG, PARSED_TRANSCRIPT, Reservation, read_memory, release_pieces
from toolcrew.concurrency.tenant_threads import in_tenant_thread
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.file_ids import TenantStore
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.plurals import count
from toolcrew.contract.run_events import CallFinished, ModelReplied, RunEvent
from toolcrew.contract.run_spec import ItemEnvironment, RunBody
from toolcrew.contract.run_views import DurableRunState, ForkPoint
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.webhooks import Webhook
from toolcrew.orchestrator.batches.environments import EnvironmentChecker
from toolcrew.orchestrator.dialects.base import CallRequested, MalformedCall
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.dialects.observations import build_tool_messages
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection
from toolcrew.orchestrator.models.choice import LOCAL
from toolcrew.orchestrator.runs.endpoints import CheckModel, accept_model, refuse_model
from toolcrew.orchestrator.runs.run_forks import (
    ForkTree,
    build_tree,
    check_count,
    name_attempt,
    plan_fork,
    read_shared_steps,
)
from toolcrew.orchestrator.runs.tenant_limits import CheckLimits, LimitReader, accept_item
from toolcrew.orchestrator.runs.webhooks import CheckWebhook, accept_webhook, build_webhook_check
from toolcrew.store.audit import Actor, build_entry, entry_text
from toolcrew.store.batches import NO_BATCH, RUN_DEFAULTS, RUNS_URL, BatchItem, ForkSource
from toolcrew.store.connection import RedisClient
from toolcrew.store.run_events import RunEventHub, not_found
from toolcrew.store.run_log import inflate_transcript, measure_transcript
from toolcrew.store.run_queue import RunQueue
from toolcrew.store.run_records import About, DurableRun, RunPage, RunRecord
from toolcrew.store.run_store import (
    MAX_BODY_BYTES,
    MAX_LISTED,
    MAX_METADATA,
    MAX_METADATA_NAME,
    MAX_METADATA_TEXT,
    MAX_PENDING,
    SHOWN_INSTRUCTION,
)
from toolcrew.store.sessions import SessionStore
from toolcrew.store.stored_runs import nearly_full
from toolcrew.store.tenants import RedisTenants


def build_transcript(run: str, record: RunRecord, entries: Sequence[RunEvent]) -> list[dict[str, Any]]:
    """Return the messages of the run so far: the request, then each reply and the results of its calls.

    Each result is a tool message here, whichever form the model received. The system prompt is missing, because an
    orchestrator builds the system prompt when the run starts.
    """
    messages: list[dict[str, Any]] = []
    if isinstance(record.item.work, RunBody):
        messages += [dict(message) for message in record.item.work.history]
        messages.append({"role": "user", "content": record.item.work.instruction})
    # Attempts after the first have another name, and call ids derive from this name.
    name, step, model_ids = run if record.attempt == 1 else f"{run}-{record.attempt}", 0, dict[str, str]()
    for event in entries:
        if isinstance(event, ModelReplied):
            step += 1
            reader = NativeDialect().open_reader(name, step, reads_tags=False)
            parts = [part for chunk in event.chunks for part in reader.feed(chunk)]
            last, end = reader.finish()
            for part in [*parts, *last]:
                if isinstance(part, CallRequested) and part.model_id:
                    model_ids[part.call.id] = part.model_id
                elif isinstance(part, MalformedCall) and part.model_id:
                    model_ids[part.call_id] = part.model_id
            messages.append(end.message)
        elif isinstance(event, CallFinished):
            messages += _build_tool_messages(model_ids, event.result)
    return messages


def _build_tool_messages(model_ids: dict[str, str], result: ToolResult) -> list[dict[str, Any]]:
    """Return the tool messages of a result. `model_ids`: toolcrew's call id -> the id that the model gave the call."""
    return build_tool_messages([(model_ids.get(result.call_id, result.call_id), result)])


MAX_PAGE = 200
_DEFAULT_ENVIRONMENT = ItemEnvironment()
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class DurableRuns:
    """Durable runs of every tenant. Any number of processes may have an instance of this class.

    Every method raises BrokerUnavailable when Redis does not answer. Every method raises ToolFailure(FILE_NOT_FOUND)
    for a run that does not exist for the tenant. The error does not reveal whether another tenant has a run of this
    id.
    """

    def __init__(
        self,
        client: RedisClient,
        deployment: str,
        keys: SigningKeys,
        tenants: RedisTenants,
        *,
        workspace_store: str | None = None,
        max_pending: int = MAX_PENDING,
        max_listed: int = MAX_LISTED,
    ) -> None:
        """Create the runs. `workspace_store`: URL or folder of the store; None: no store. `max_pending`: limit of a
        tenant's queued runs. `max_listed`: limit of the runs that are listed.
        """
        self._tenants = tenants
        self._workspace_store = workspace_store
        self._sessions = SessionStore(client, deployment)
        self.queue = RunQueue(client, deployment, keys)
        self._limits = (max_pending, max_listed)
        self.check_webhook: CheckWebhook = accept_webhook
        self.check_model: CheckModel = accept_model
        self.check_limits: CheckLimits = accept_item
        self.hub = RunEventHub(client, deployment)

    @classmethod
    def on(cls, pool: PoolConnection, settings: OrchestratorSettings) -> "DurableRuns":
        """Return the durable runs of a pool. Create one instance per process: all followers of the instance share one
        connection. Close `hub` before the pool.
        """
        runs = cls(pool.redis, settings.deployment, pool.keys, pool.tenants, workspace_store=settings.workspace_store)
        runs.check_webhook = build_webhook_check(pool.dispatcher)
        runs.check_limits = LimitReader(pool, settings.deployment).check_run
        return runs

    async def start(
        self,
        tenant: str,
        body: RunBody,
        environment: ItemEnvironment = _DEFAULT_ENVIRONMENT,
        *,
        idempotency_key: str | None = None,
        metadata: Mapping[str, str] | None = None,
        priority: int = 0,
        webhook: Webhook | None = None,
        token: str = "",
        forked_from: ForkSource | None = None,
        count: int = 1,
    ) -> DurableRun:
        """Queue a run. An orchestrator claims the run shortly afterwards.

        `idempotency_key`: a second start with the same key and the same request returns the first run and starts
        nothing. `webhook`: receives the end of the run. `token`: if it is set, this process executes the run itself,
        and claims it with this token; the run is never queued (own_run.py). `count`: number of runs, including this
        one, that the tenant's queue must still be able to take. `environment.session`: an open session for the run. The
        session stays open after the run, and no other run uses the session at the same time.

        Raises ToolFailure:
        - INVALID_ARGUMENTS: a path on a machine, a body above 1 MiB, invalid metadata, a key of another request, a
          session that another run uses, a webhook that can never be delivered, a model that does not
          exist, or more than the tenant or its hosts allow (image, network, sizes, secrets, tools, timeouts).
        - QUOTA_EXCEEDED: too many runs wait, or Redis is nearly full.
        - BUDGET_EXCEEDED: a budget of the tenant is used up.
        - SESSION_NOT_FOUND: the session is not open.
        - UNKNOWN_TENANT: the tenant does not exist.
        - PERMISSION_DENIED: the tenant's policy does not allow the model.
        """
        about = _build_about(body, environment, metadata or {}, forked_from)
        run = secrets.token_hex(12) if idempotency_key is None else _derive_run_id(tenant, idempotency_key)
        _check_files(environment, TenantStore(self._workspace_store, tenant))
        item = _build_item(run, body, environment, priority, is_own=bool(token))
        item = item.model_copy(update={"forked_from": forked_from})
        policy = await self._tenants.policy(tenant)
        if body.model is not None and not policy.allows_model(body.model):
            raise refuse_model(tenant, body.model)
        if body.model is not None:
            await self.check_model(tenant, body.model)
        if forked_from is None:
            # A fork has the session of its source, whose options were accepted when the source was started.
            await self.check_limits(tenant, item)
        await self._tenants.check_budgets(tenant)
        if environment.session is not None:
            await self._check_session(tenant, environment.session)
        if webhook is not None:
            await self.check_webhook(tenant, webhook)
        text = item.model_dump_json()
        notice = f"\0{webhook.model_dump_json()}" if webhook is not None else ""
        # The digest covers everything that the client sent, so that a second request with the same key is accepted only
        # if it is equal.
        digest = hashlib.sha256(
            f"{text}\0{json.dumps(dict(metadata or {}), sort_keys=True)}{notice}".encode()
        ).hexdigest()
        limits = (self._limits[0] - count + 1, self._limits[1])
        self._check_started(
            tenant,
            await self.queue.runs.start_run(tenant, run, item, digest, about, limits, webhook, token, self.queue.owner),
        )
        return await self.get(tenant, run)

    async def fork(
        self, tenant: str, run: str, step: int, n: int = 1, *, idempotency_key: str | None = None
    ) -> list[DurableRun]:
        """Queue `n` runs that share the first `step` steps of a run, and continue from the state of its session after
        these steps. The shared requests to the model and calls are neither repeated nor counted again.

        The run must keep its states (`RunBody.keep_states`); it may still be running. `step` 0: before the first reply.
        `idempotency_key` works as in `start`.

        Raises ToolFailure: INVALID_ARGUMENTS for a step without a kept state, SESSION_NOT_FOUND for a state that was
        released or has expired. Also raises the errors of `start`.
        """
        check_count(n)
        record, entries = await self.queue.runs.open_log(tenant, _check_run_id(run), batch=None)
        shared = await read_shared_steps(entries, name_attempt(run, record.attempt), step)
        batch = record.batch
        defaults = RUN_DEFAULTS if batch == NO_BATCH else (await self.queue.batches.get(tenant, batch)).defaults
        plan = plan_fork(run, record, shared, step, defaults)
        if await self._sessions.find(tenant, plan.state) is None:
            raise ToolFailure(
                ErrorCode.SESSION_NOT_FOUND,
                f"the state of run {run} after {count(step, 'step')} was released: a state is kept for a day after its "
                "last use, until the run is cancelled or retried. Fork another run",
            )
        names = [f"{idempotency_key}/{number}" if idempotency_key is not None else None for number in range(n)]
        # The first fork is refused if there is no room for all of them.
        return [
            await self.start(
                tenant,
                plan.body,
                plan.environment,
                idempotency_key=name,
                priority=plan.priority,
                forked_from=plan.source,
                count=n - number,
            )
            for number, name in enumerate(names)
        ]

    async def tree(self, tenant: str, run: DurableRun) -> ForkTree:
        """Return the tree of forks that contains the run, from the first run on (build_tree)."""
        return await build_tree(self.queue, tenant, run)

    async def get(self, tenant: str, run: str) -> DurableRun:
        """Return a run with its complete answer."""
        return await self.queue.runs.get(tenant, _check_run_id(run))

    async def list(
        self, tenant: str, *, cursor: str | None = None, limit: int = 50, state: DurableRunState | None = None
    ) -> RunPage:
        """Return a page of runs, the newest first.

        A page may have fewer than `limit` runs even if more pages follow. Use `next_cursor` to find the end. The
        cursor stays valid while runs are started and removed. Raises ToolFailure(INVALID_ARGUMENTS): the cursor is
        invalid or the limit is not 1 to 200.
        """
        if not 1 <= limit <= MAX_PAGE:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, f"{limit} runs cannot be listed at once: use a limit from 1 to {MAX_PAGE}"
            )
        runs, before = await self.queue.runs.list_runs(tenant, _parse_cursor(cursor), limit, state)
        return RunPage(runs=tuple(runs), next_cursor=str(before) if before else None)

    async def cancel(self, tenant: str, run: str, *, actor: Actor | None = None) -> DurableRun:
        """Cancel a run and return the run. A waiting run ends at once, a running run within 2 s. A run that has ended
        does not change.

        `actor`: the person or program that cancels. The audit records the cancellation if the actor is an operator,
        and does not record it if the actor is the tenant.
        """
        entry = ""
        if actor is not None and actor.role != "tenant":
            entry = entry_text(build_entry(actor, "run.cancel", _check_run_id(run), tenant=tenant))
        await self.queue.runs.cancel_run(tenant, _check_run_id(run), entry)
        return await self.get(tenant, run)

    async def transcript(self, tenant: str, run: str) -> Sequence[dict[str, Any]]:
        """Return the run's messages in the OpenAI wire shape.

        A run that has ended normally has all messages. A run that is not finished or that was interrupted has the
        messages so far, without the system prompt.
        """
        messages = await self.queue.runs.transcript(tenant, _check_run_id(run))
        if messages is not None:
            return messages
        record, entries = await self.queue.runs.read_log(tenant, run)
        return await in_tenant_thread(tenant, build_transcript, run, record, entries)

    @asynccontextmanager
    async def hold_transcript(
        self, tenant: str, run: str
    ) -> AsyncIterator[tuple[Sequence[dict[str, Any]], Reservation]]:
        """Yield the messages as `transcript` returns them, and the memory that is reserved for them during the block.
        Raises the errors of `ReadMemory.reserve`.
        """
        memory, packed = read_memory(), await self.queue.runs.packed_bytes(tenant, _check_run_id(run))
        if packed:
            async with memory.reserve(tenant, packed):
                data = await self.queue.runs.packed_transcript(tenant, run)
                size = PARSED_TRANSCRIPT * await in_tenant_thread(tenant, measure_transcript, run, data)
                del data
        else:
            size = PARSED_LOG * await self.queue.runs.log_bytes(tenant, run)
        async with memory.reserve(tenant, size) as reservation:
            yield await self.transcript(tenant, run), reservation

    @asynccontextmanager
    async def open_transcript(self, tenant: str, run: str) -> AsyncIterator[Iterator[bytes] | None]:
        """Yield the stored messages as JSON text in pieces; None if the run has no stored transcript. Memory is
        reserved only for the compressed text that is left. Raises ConfigError: the transcript is damaged.
        """
        size = await self.queue.runs.packed_bytes(tenant, _check_run_id(run))
        async with read_memory().reserve(tenant, size) as memory:
            packed = await self.queue.runs.packed_transcript(tenant, run) if size else deque[bytes]()
            # The first piece must not be sent if the rest is damaged.
            if packed:
                await in_tenant_thread(tenant, measure_transcript, run, packed)
            yield inflate_transcript(run, release_pieces(packed, memory)) if packed else None

    async def stored_events(self, tenant: str, run: str, after: str = "") -> AsyncIterator[tuple[str, str]]:
        """Yield the events that exist now, in the form that `follow` yields."""
        page = await self.hub.read(tenant, _check_run_id(run), after)
        while page.entries:
            for entry in page.entries:
                yield entry
            page = await self.hub.read(tenant, run, page.entries[-1][0])

    def follow(self, tenant: str, run: str, after: str = "") -> AsyncIterator[tuple[str, str]]:
        """Yield the run's events after the event id `after`, as (id, JSON), until the last event (`RunEnded`).

        Stored events come first, new events follow when they arrive. `after` "": start with the oldest stored event.
        An `EventsMissed` event replaces events that are no longer stored. Raises ToolFailure(INVALID_ARGUMENTS): the
        id is invalid.
        """
        return self.hub.follow(tenant, _check_run_id(run), after)

    async def _check_session(self, tenant: str, session: str) -> None:
        """Raise ToolFailure(SESSION_NOT_FOUND) unless the tenant has this session open."""
        if not _NAME.fullmatch(session) or await self._sessions.find(tenant, session) is None:
            raise ToolFailure(
                ErrorCode.SESSION_NOT_FOUND,
                "there is no open session with this name: open one, or omit the session, so that the run opens its own",
            )

    def _check_started(self, tenant: str, reply: Sequence[str]) -> None:
        """Raise ToolFailure unless the reply of the start script says that the run exists."""
        match reply:
            case ["started" | "known"]:
                return
            case ["full"]:
                message = (
                    f"{self._limits[0]} runs of tenant {tenant} wait, which is the limit: start more when some have "
                    "begun, or cancel some"
                )
                raise ToolFailure(ErrorCode.QUOTA_EXCEEDED, message)
            case ["memory"]:
                raise nearly_full()
            case ["busy", other]:
                message = (
                    f"run {other} uses that session: wait for its end, cancel it, or leave the session out, so that "
                    "the new run opens its own"
                )
            case _:
                message = (
                    "another run was started with that idempotency key: send the same request again, or use another key"
                )
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, message)


def _build_item(run: str, body: RunBody, environment: ItemEnvironment, priority: int, *, is_own: bool) -> BatchItem:
    """Return the item of a run. `is_own`: this process executes the run. Raises ToolFailure(INVALID_ARGUMENTS): no
    orchestrator accepts the input.
    """
    try:
        item = BatchItem(custom_id=run, line=1, url=RUNS_URL, work=body, environment=environment, priority=priority)
        text = item.model_dump_json()
    except ValidationError as error:
        raise _refused(f"{describe_invalid(error)}; fix the request") from None
    except (ValueError, RecursionError) as error:
        raise _refused("the run's request cannot be encoded as JSON: use less nesting and valid Unicode") from error
    size = len(text.encode())
    if size > MAX_BODY_BYTES:
        raise _refused(
            f"the run's request has {size} bytes, more than {MAX_BODY_BYTES}: put large texts into files of a session"
        )
    try:
        BatchItem.model_validate_json(text)
    except ValidationError as error:
        raise _refused("the run's request is nested too deeply: use less nesting") from error
    if body.model == LOCAL and not is_own:
        raise _refused(
            "an orchestrator does not start a local model for a run: name a model of the orchestrator's endpoint, or "
            "omit `model`"
        )
    if environment.session is not None and environment != ItemEnvironment(
        session=environment.session, artifacts=environment.artifacts
    ):
        raise _refused(
            "an open session has its sandbox and files: leave out `image`, `network`, sizes, `user`, `tool_config`, "
            "`workspace` and `restore`, or `session`"
        )
    return item


def _check_files(environment: ItemEnvironment, store: TenantStore) -> None:
    """Raise ToolFailure(INVALID_ARGUMENTS) for initial files that no sandbox can have, and for invalid patterns."""
    if environment.workspace is not None and environment.restore is not None:
        raise _refused("a session starts from a workspace or a checkpoint: leave out `workspace` or `restore`")
    for path, problem in EnvironmentChecker(None, store).find_errors(environment.workspace, environment.artifacts):
        raise _refused(f"{'.'.join(str(part) for part in path)}: {problem}")


def _check_run_id(run: str) -> str:
    """Return the run id. Raises ToolFailure(FILE_NOT_FOUND): the id is invalid. An invalid id could address another
    Redis key.
    """
    if not _NAME.fullmatch(run):
        raise not_found(run)
    return run


def _build_about(
    body: RunBody, environment: ItemEnvironment, metadata: Mapping[str, str], source: ForkSource | None
) -> str:
    """Return the fields that lists show, as JSON. Raises ToolFailure(INVALID_ARGUMENTS): the metadata is invalid."""
    is_long = any(
        not 1 <= len(name) <= MAX_METADATA_NAME or len(text) > MAX_METADATA_TEXT for name, text in metadata.items()
    )
    if len(metadata) > MAX_METADATA or is_long:
        raise _refused(
            f"metadata may have {MAX_METADATA} entries, names of {MAX_METADATA_NAME} characters and texts of "
            f"{MAX_METADATA_TEXT}: send less"
        )
    try:
        about = About(
            instruction=body.instruction[:SHOWN_INSTRUCTION],
            model=body.model,
            session=environment.session,
            metadata=dict(metadata),
            forked_from=ForkPoint(run=source.run, step=source.step) if source is not None else None,
        )
        return about.model_dump_json()
    except ValueError as error:
        raise _refused("metadata must be texts in valid Unicode: change them") from error


def _derive_run_id(tenant: str, key: str) -> str:
    """Return the run id that belongs to an idempotency key. The same tenant and key always give the same id."""
    if not 1 <= len(key) <= 256:
        raise _refused("an idempotency key must have 1 to 256 characters: use another key")
    return hashlib.sha256(f"{tenant}\0{NO_BATCH}\0{key}".encode(errors="replace")).hexdigest()[:24]


def _parse_cursor(cursor: str | None) -> int:
    """Return the list position of a cursor; a position above all runs for None. Raises
    ToolFailure(INVALID_ARGUMENTS).
    """
    if cursor is None:
        return 2**53
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) <= 15):
        raise _refused("the cursor is invalid: send `next_cursor` of the previous page, or omit it for the first page")
    return int(cursor)


def _refused(message: str) -> ToolFailure:
    """Return the error for an invalid request."""
    return ToolFailure(ErrorCode.INVALID_ARGUMENTS, message)
