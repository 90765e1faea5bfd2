"""Runs that programs start, follow, list, cancel and read. Any orchestrator can execute them: all state is in Redis."""

import hashlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from contract.calls import ToolResult
from contract.errors import ErrorCode, ToolFailure
from contract.run_events import CallFinished, ModelReplied
from contract.signing import SigningKeys
from contract.webhooks import Webhook
from orchestrator.batches.grounds import Grounds
from orchestrator.dialects.base import CallRequested, MalformedCall
from orchestrator.dialects.native import NativeDialect
from orchestrator.dialects.observations import build_tool_messages
from orchestrator.dispatch.pool_connection import PoolConnection
from orchestrator.models.choice import LOCAL
from orchestrator.settings import OrchestratorSettings
from store.archives.files import TenantStore
from store.audit import Actor, build_entry, entry_text
from store.batches import HOSTED_BATCH, RUNS_URL, BatchItem, Ground, RunBody
from store.connection import RedisClient
from store.run_events import RunEventHub, not_found
from store.run_log import LogEntry
from store.runs import (
    MAX_BODY_BYTES,
    MAX_KEPT,
    MAX_METADATA,
    MAX_METADATA_NAME,
    MAX_METADATA_TEXT,
    MAX_PENDING,
    SHOWN_INSTRUCTION,
    About,
    HostedRun,
    HostedState,
    RunPage,
    RunQueue,
    RunRecord,
)
from store.sessions import SessionStore
from store.tenants import RedisTenants


def build_transcript(run: str, record: RunRecord, entries: Sequence[LogEntry]) -> list[dict[str, Any]]:
    """What has been said so far: the request, each reply, and the results of its calls. Results are tool messages here,
    however the model is told of them. Without the system prompt, which is made when the run is worked."""
    messages: list[dict[str, Any]] = []
    if isinstance(record.item.work, RunBody):
        messages += [dict(message) for message in record.item.work.history]
        messages.append({"role": "user", "content": record.item.work.instruction})
    name, step, known = run if record.attempt == 1 else f"{run}-{record.attempt}", 0, dict[str, str]()
    for event in (entry.event for entry in entries):
        if isinstance(event, ModelReplied):
            step += 1
            reader = NativeDialect().open_reader(name, step, reads_tags=False)
            parts = [part for chunk in event.chunks for part in reader.feed(chunk)]
            last, end = reader.finish()
            for part in [*parts, *last]:
                if isinstance(part, CallRequested) and part.model_id:
                    known[part.call.id] = part.model_id
                elif isinstance(part, MalformedCall) and part.model_id:
                    known[part.call_id] = part.model_id
            messages.append(end.message)
        elif isinstance(event, CallFinished):
            messages += _observed(known, event.result)
    return messages


def _observed(known: dict[str, str], result: ToolResult) -> list[dict[str, Any]]:
    return build_tool_messages([(known.get(result.call_id, result.call_id), result)])


MAX_PAGE = 200
_NOWHERE = Ground()
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class HostedRuns:
    """Such runs of every tenant. Any number of processes may have one of these.

    Every method raises BrokerUnavailable when Redis does not answer, and ToolFailure(FILE_NOT_FOUND) for a run that the
    tenant has not: whether another has it is not told.
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
        max_kept: int = MAX_KEPT,
    ) -> None:
        """`workspace_store`: the URL or folder of the store; None: there is none. `max_pending`: limit of a tenant's
        queued runs; `max_kept`: limit of the runs that are listed.
        """
        self._tenants = tenants
        self._workspace_store = workspace_store
        self._places = SessionStore(client, deployment)
        self._queue = RunQueue(client, deployment, keys)
        self._limits = (max_pending, max_kept)
        self.hub = RunEventHub(client, deployment)

    @classmethod
    def on(cls, pool: PoolConnection, settings: OrchestratorSettings) -> "HostedRuns":
        """Those of a pool. One a process: whoever follows runs by it shares one connection. `hub.close` before the pool
        is.
        """
        return cls(pool.redis, settings.deployment, pool.keys, pool.tenants, workspace_store=settings.workspace_store)

    async def start(
        self,
        tenant: str,
        body: RunBody,
        ground: Ground = _NOWHERE,
        *,
        word: str | None = None,
        metadata: Mapping[str, str] | None = None,
        priority: int = 0,
        webhook: Webhook | None = None,
    ) -> HostedRun:
        """Queue a run; some orchestrator takes it within a moment. `word`: started again with the same word it is the
        same run, and nothing is done.

        `webhook`: where its end is announced. `ground.session`: an open session that the run works in, by itself among
        runs; it stays open. Raises ToolFailure: INVALID_ARGUMENTS (a path of some machine, a body above 1 MiB, metadata
        out of bounds, a word that stands for another request, a session in which another run works), QUOTA_EXCEEDED
        (too many wait), SESSION_NOT_FOUND, UNKNOWN_TENANT.
        """
        about = _build_about(body, ground, metadata or {})
        run = secrets.token_hex(12) if word is None else _run_of_word(tenant, word)
        _check_files(ground, TenantStore(self._workspace_store, tenant))
        item = _build_item(run, body, ground, priority)
        await self._tenants.policy(tenant)
        if ground.session is not None:
            await self._check_session(tenant, ground.session)
        text = item.model_dump_json()
        notice = f"\0{webhook.model_dump_json()}" if webhook is not None else ""
        digest = hashlib.sha256(
            f"{text}\0{json.dumps(dict(metadata or {}), sort_keys=True)}{notice}".encode()
        ).hexdigest()
        self._check_started(
            tenant, await self._queue.start_hosted(tenant, run, item, digest, about, self._limits, webhook)
        )
        return await self.get(tenant, run)

    async def get(self, tenant: str, run: str) -> HostedRun:
        """Return a run with its complete answer."""
        return await self._queue.hosted(tenant, _checked(run))

    async def list(
        self, tenant: str, *, cursor: str | None = None, limit: int = 50, state: HostedState | None = None
    ) -> RunPage:
        """Return some of them, the newest first. A page may have fewer than `limit` and still be followed by more: go
        by `next_cursor`, which stays valid while runs are started and removed. Raises ToolFailure(INVALID_ARGUMENTS)
        for an invalid cursor, or a limit beyond 1 to 200."""
        if not 1 <= limit <= MAX_PAGE:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, f"{limit} runs cannot be listed at once: give 1 to {MAX_PAGE}"
            )
        runs, before = await self._queue.list_hosted(tenant, _parse_cursor(cursor), limit, state)
        return RunPage(runs=tuple(runs), next_cursor=str(before) if before else None)

    async def cancel(self, tenant: str, run: str, *, actor: Actor | None = None) -> HostedRun:
        """End a run: at once when it waits, else within 2 s. One that has ended does not change. `actor`: who does it;
        the audit has what an operator ends, but not what a tenant ends of its own."""
        entry = ""
        if actor is not None and actor.role != "tenant":
            entry = entry_text(build_entry(actor, "run.cancel", _checked(run), tenant=tenant))
        await self._queue.cancel_hosted(tenant, _checked(run), entry)
        return await self.get(tenant, run)

    async def transcript(self, tenant: str, run: str) -> Sequence[dict[str, Any]]:
        """Return its messages in the OpenAI wire shape: all when it has ended; until then, and for a run that broke
        off, those so far, without the system prompt."""
        messages = await self._queue.transcript(tenant, _checked(run))
        return messages if messages is not None else build_transcript(run, *await self._queue.read_log(tenant, run))

    async def stored_events(self, tenant: str, run: str, after: str = "") -> AsyncIterator[tuple[str, str]]:
        """Yield the events that exist now, as `follow`."""
        page = await self.hub.read(tenant, _checked(run), after)
        while page.entries:
            for entry in page.entries:
                yield entry
            page = await self.hub.read(tenant, run, page.entries[-1][0])

    def follow(self, tenant: str, run: str, after: str = "") -> AsyncIterator[tuple[str, str]]:
        """Its events after that id, (id, JSON) each, until the last one (`RunEnded`): those of before first, then as
        they come. `after` "": all that are kept. An `EventsMissed` stands for those that are not kept any more. Raises
        ToolFailure(INVALID_ARGUMENTS) for an id that is none."""
        return self.hub.follow(tenant, _checked(run), after)

    async def _check_session(self, tenant: str, session: str) -> None:
        if not _NAME.fullmatch(session) or await self._places.find(tenant, session) is None:
            raise ToolFailure(
                ErrorCode.SESSION_NOT_FOUND,
                "there is no such session open: open one, or leave the session out for one of the run's own",
            )

    def _check_started(self, tenant: str, reply: Sequence[str]) -> None:
        match reply:
            case ["started" | "known"]:
                return
            case ["full"]:
                message = (
                    f"{self._limits[0]} runs of tenant {tenant} wait, which is all that may: start more when some have "
                    "begun, or cancel some"
                )
                raise ToolFailure(ErrorCode.QUOTA_EXCEEDED, message)
            case ["busy", other]:
                message = (
                    f"run {other} works in that session: wait for its end, cancel it, or leave the session out for one "
                    "of the run's own"
                )
            case _:
                message = "another run was started with that word: give the same request again, or another word"
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, message)


def _build_item(run: str, body: RunBody, ground: Ground, priority: int) -> BatchItem:
    """Return the item of a run. Raises ToolFailure(INVALID_ARGUMENTS) for input that no orchestrator accepts."""
    try:
        item = BatchItem(custom_id=run, line=1, url=RUNS_URL, work=body, ground=ground, priority=priority)
        text = item.model_dump_json()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _refused(
            f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}; give a run that fits"
        ) from None
    except (ValueError, RecursionError) as error:
        raise _refused(
            "the run's request cannot be written down as JSON: make it flatter, in Unicode that can be"
        ) from error
    size = len(text.encode())
    if size > MAX_BODY_BYTES:
        raise _refused(
            f"the run's request has {size} bytes, and {MAX_BODY_BYTES} are what it may have: leave large texts in a "
            "session's files"
        )
    try:
        BatchItem.model_validate_json(text)
    except ValidationError as error:
        raise _refused(
            "the run's request could not be read again, for it is nested too deeply: make it flatter"
        ) from error
    if body.model == LOCAL:
        raise _refused("no orchestrator starts a model of its own for a run: name one of its endpoint, or none")
    if ground.session is not None and ground != Ground(session=ground.session, artifacts=ground.artifacts):
        raise _refused(
            "an open session has its image, network and files: leave out `image`, `network`, `workspace` and "
            "`restore`, or `session`"
        )
    return item


def _check_files(ground: Ground, store: TenantStore) -> None:
    """Raise ToolFailure(INVALID_ARGUMENTS) for first files that no sandbox can have, and invalid patterns."""
    if ground.workspace is not None and ground.restore is not None:
        raise _refused("a session starts from a workspace or a checkpoint: leave out `workspace` or `restore`")
    for path, problem in Grounds(None, store).complaints(ground):
        raise _refused(f"{'.'.join(str(part) for part in path)}: {problem}")


def _checked(run: str) -> str:
    """Raise ToolFailure(FILE_NOT_FOUND) for an invalid run id, which could otherwise address another Redis key."""
    if not _NAME.fullmatch(run):
        raise not_found(run)
    return run


def _build_about(body: RunBody, ground: Ground, metadata: Mapping[str, str]) -> str:
    """Return the fields that lists show, as JSON. Raises ToolFailure(INVALID_ARGUMENTS) for invalid metadata."""
    is_long = any(
        not 1 <= len(name) <= MAX_METADATA_NAME or len(text) > MAX_METADATA_TEXT for name, text in metadata.items()
    )
    if len(metadata) > MAX_METADATA or is_long:
        raise _refused(
            f"metadata may have {MAX_METADATA} entries with names of {MAX_METADATA_NAME} characters and texts of "
            f"{MAX_METADATA_TEXT}: give less"
        )
    try:
        about = About(
            instruction=body.instruction[:SHOWN_INSTRUCTION],
            model=body.model,
            session=ground.session,
            metadata=dict(metadata),
        )
        return about.model_dump_json()
    except ValueError as error:
        raise _refused("metadata must be texts, in Unicode that can be written down: give other ones") from error


def _run_of_word(tenant: str, word: str) -> str:
    if not 1 <= len(word) <= 256:
        raise _refused("the word under which a run is started once must have 1 to 256 characters: give a shorter one")
    return hashlib.sha256(f"{tenant}\0{HOSTED_BATCH}\0{word}".encode(errors="replace")).hexdigest()[:24]


def _parse_cursor(cursor: str | None) -> int:
    if cursor is None:
        return 2**53
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) <= 15):
        raise _refused("this is no cursor of a list of runs: give `next_cursor` as it came, or none to begin")
    return int(cursor)


def _refused(message: str) -> ToolFailure:
    return ToolFailure(ErrorCode.INVALID_ARGUMENTS, message)
