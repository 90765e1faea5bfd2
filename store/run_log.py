"""The log of one run in Redis. Only the owner of the run (the process that executes it) appends entries, in order.

Invariant: an event takes effect only after its entry is in the log. Another process can therefore resume the run.

Each entry is signed for its tenant, run, attempt and position. Without signatures, a forged reply could make an
orchestrator send calls, and a forged result could hide that a call did not run. A process without the secret can only
remove entries, or restore earlier genuine entries at their own positions.

The transcript of a durable run contains its messages, and is stored after the end of the run. The transcript is only
shown, so it is not signed.
"""

import asyncio
import json
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from pydantic import JsonValue

from toolcrew.concurrency.tenant_threads import in_tenant_thread
from toolcrew.contract.errors import BrokerFull, BrokerUnavailable, ConfigError, EnvelopeRefused, RecordRefused
from toolcrew.contract.json_limits import has_more_values_in_text
from toolcrew.contract.names import account_key, open_sessions_key, run_key, tenant_key
from toolcrew.contract.run_events import (
    ArtifactsCopied,
    CallFinished,
    CallReviewed,
    ModelReplied,
    RunEvent,
    SessionOpened,
    SessionOpening,
    StateForking,
    StateKept,
    SubmissionTaken,
    parse_event,
)
from toolcrew.contract.signing import SigningKeys
from toolcrew.store.batches import RUN_TTL_S
from toolcrew.store.clock import SharedClock
from toolcrew.store.connection import broker_errors
from toolcrew.store.memory import MEMORY_LUA, TenantMemoryUsed, describe_no_memory
from toolcrew.store.scripts import Script
from toolcrew.store.sessions import SessionStore
from toolcrew.store.usage import USAGE_LUA, ReplySpending, session_usage_key, usage_prefix
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_TRANSCRIPT_BYTES = 64 * 1024 * 1024
"""Limit of a transcript as JSON, in bytes. A longer transcript is not stored; the log of its run is read instead."""
MAX_TRANSCRIPT_VALUES = 200_000


def run_log_key(deployment: str, tenant: str, run: str) -> str:
    """Return the key of the list of a run's entries."""
    return tenant_key(deployment, tenant, f"run.{run}:log")


def run_sessions_key(deployment: str, tenant: str, run: str) -> str:
    """Return the key of the set of the signed names of a run's sessions. The log has them too, but reading a large log
    takes long.
    """
    return tenant_key(deployment, tenant, f"run.{run}:sessions")


def run_artifacts_key(deployment: str, tenant: str, run: str) -> str:
    """Return the key of the archive with a run's artifacts, which are stored until the grader of the run needs them."""
    return tenant_key(deployment, tenant, f"run.{run}:artifacts")


LOGGED = (
    SessionOpening, SessionOpened, ModelReplied, CallReviewed, CallFinished, StateForking, StateKept, ArtifactsCopied,
    SubmissionTaken,
)  # fmt: skip
"""Types of the events that are stored in the log of a run. Another process resumes the run from them."""


def parse_entry(text: str | bytes) -> RunEvent:
    """Return the event in a text. Raises ValueError: another release wrote it."""
    event = parse_event(json.loads(text))
    if not isinstance(event, LOGGED):
        raise ValueError("the entry is not an event of a run log")
    return event


PAGE = 16
"""Number of entries of a log that one command reads."""
RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
FULL_S = 30.0
"""Time for which a run waits while Redis has no memory, in seconds. Then the run fails."""
# `sealed_session`: the signed session of the entry, '' for none. `prefix`: of the tenant's days of usage. Returns
# `added`; `there` (an earlier try added the entry, and its reply was lost); `taken` (another process owns the run);
# `full` (the tenant may store no more); or the number of entries, if Redis has lost the last entries.
_APPEND = Script(
    USAGE_LUA
    + MEMORY_LUA
    + """
if redis.call('HGET', run, 'claim') ~= claim then return 'taken' end
local length, position = redis.call('LLEN', log), tonumber(index)
if length > position then return 'there' end
if length < position then return tostring(length) end
local now = read_time()
-- The model has sent its reply: it costs the tenant, whether the reply can be stored or not.
count_reply(prefix, has_session == '1' and session_usage, prompt, completion, cached, cost, at)
if not has_room(account, now, RUNNING_WORK) then return 'full' end
redis.call('RPUSH', log, entry)
if sealed_session ~= '' then redis.call('SADD', sessions, sealed_session) end
grow_bytes(account, now, run, 'log_bytes', #entry + #sealed_session + ENTRY_BYTES, now + ttl_s)
if is_progress == '1' then redis.call('HDEL', run, 'losses', 'denials') end
if has_states == '1' then redis.call('HSET', run, 'has_states', '1') end
for _, key in ipairs({run, log, sessions}) do redis.call('EXPIRE', key, ttl_s) end
return 'added'
""",
    keys=("run", "log", "sessions", "session_usage", "account"),
    args=(
        "claim",
        "index",
        "entry",
        "sealed_session",
        "ttl_s",
        "is_progress",
        "prefix",
        "has_session",
        "prompt",
        "completion",
        "cached",
        "cost",
        "at",
        "has_states",
    ),
)
# Returns 1; 0 if the tenant may store no more. Another owner of the run decides itself about the archive. `archive` '':
# delete it.
_KEEP_ARTIFACTS = Script(
    MEMORY_LUA
    + """
if redis.call('HGET', run, 'claim') ~= claim then return 1 end
local now = read_time()
if archive == '' then
  redis.call('DEL', artifacts)
elseif has_room(account, now, RUNNING_WORK) then
  redis.call('SET', artifacts, archive, 'EX', ttl_s)
else
  return 0
end
set_bytes(account, now, run, 'artifact_bytes', #archive, now + ttl_s)
return 1
""",
    keys=("run", "artifacts", "account"),
    args=("claim", "archive", "ttl_s"),
)


class RunTaken(Exception):
    """Another process has claimed the run. This process must stop executing it."""


@dataclass(frozen=True)
class RunAttempt:
    """An attempt at a run. `claim`: the token with which the owner (the process that executes the run) appends to the
    log; empty for a process that only reads.
    """

    tenant: str
    run: str
    number: int
    claim: str = ""


class RunLog:
    """The log of one run, with a copy in the memory of its owner. `entries`: the entries that earlier owners wrote,
    then those of this owner. `clock`: Redis's clock.
    """

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        deployment: str,
        keys: SigningKeys,
        attempt: RunAttempt,
        entries: list[RunEvent],
        clock: SharedClock,
    ) -> None:
        self.clock = clock
        self._client = client
        self._artifacts_key = run_artifacts_key(deployment, attempt.tenant, attempt.run)
        self._deployment = deployment
        self._keys = keys
        self._attempt = attempt
        self.run = attempt.run
        self.entries = entries
        self.session: str | None = None
        """The session whose usage the tokens of new entries are added to."""
        self._spending: dict[int, ReplySpending] = {}
        self.has_grown = False
        """True if the run has made progress in this process."""
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    async def load(
        cls, client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys, attempt: RunAttempt
    ) -> "RunLog":
        """Load the log of an attempt. Raises BrokerUnavailable when Redis does not answer. Raises ConfigError: the log
        cannot be verified or read.
        """
        clock = SharedClock()
        with broker_errors("the run's log was not read"):
            seconds, micros = await client.time()
            clock.learn(seconds + micros / 1e6)
        entries = [entry async for entry in read_entries(client, deployment, keys, attempt)]
        return cls(client, deployment, keys, attempt, entries, clock)

    async def append(self, entry: RunEvent, spending: ReplySpending | None = None) -> None:
        """Append an entry, and add `spending` (tokens and cost) to the usage of the tenant in the same step. Wait while
        Redis does not answer. Raises RunTaken: another process owns the run.
        """
        # Calls of one step run at the same time. The position is a part of the signature, so entries must not race for
        # it.
        async with self._one_at_a_time:
            # Add the entry in memory first. If this task is cancelled below, the next append writes this entry too,
            # unless Redis has it already.
            self.entries.append(entry)
            index, failures, full_since = len(self.entries) - 1, 0, 0.0
            if spending is not None:
                self._spending[index] = spending
            while index < len(self.entries):
                try:
                    with broker_errors("the entry was not added"):
                        reply = await self._add(index)
                except BrokerFull as error:
                    # Waiting longer would hide the cause, and only an operator or the end of runs frees memory.
                    log.error("run_log_without_memory", run=self._attempt.run, error=str(error))
                    full_since = full_since or time.monotonic()
                    if time.monotonic() - full_since > FULL_S:
                        raise
                    await asyncio.sleep(RETRY_S[-1])
                    continue
                except BrokerUnavailable as error:
                    log.warning("run_log_unanswered", run=self._attempt.run, error=str(error))
                    await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
                    failures += 1
                    continue
                # The new owner continues from the entries that are in Redis. Nothing that this process still does has
                # an effect.
                if reply == "taken":
                    raise RunTaken(self._attempt.run)
                if reply == "full":
                    self._spending.pop(index, None)  # counted already
                    raise TenantMemoryUsed(describe_no_memory("the run was ended, because its log cannot grow"))
                # If Redis has lost entries, the owner adds them again from memory.
                index = index + 1 if reply in ("added", "there") else int(reply)

    async def keep_artifacts(self, archive: bytes) -> None:
        """Store the archive of artifacts that waits for the grader, with the lifetime of the log. Raises
        TenantMemoryUsed. Raises BrokerUnavailable.
        """
        # The archive is not signed, because the signed log entry contains its hash.
        with broker_errors("the artifacts were not stored"):
            if not await self._change_artifacts(archive):
                raise TenantMemoryUsed(describe_no_memory("the item was not graded, because its artifacts need memory"))

    async def load_artifacts(self) -> bytes | None:
        """Return the archive; None if it is no longer stored. The caller checks its hash. Raises BrokerUnavailable."""
        with broker_errors("the artifacts were not read"):
            archive: Any = await self._client.get(self._artifacts_key)
        return archive if isinstance(archive, bytes) else None

    async def drop_artifacts(self) -> None:
        """Delete the archive. If Redis does not answer, it expires with the log."""
        with suppress(BrokerUnavailable), broker_errors("the artifacts were not deleted"):
            await self._change_artifacts(b"")

    async def _change_artifacts(self, archive: bytes) -> int:
        names = (self._deployment, self._attempt.tenant, self._attempt.run)
        reply = await _KEEP_ARTIFACTS.run(
            self._client,
            run=run_key(*names),
            artifacts=self._artifacts_key,
            account=account_key(*names[:2]),
            claim=self._attempt.claim,
            archive=archive,
            ttl_s=RUN_TTL_S,
        )
        return int(reply)

    async def _add(self, index: int) -> str:
        attempt, event = self._attempt, self.entries[index]
        purpose = entry_purpose(attempt.tenant, attempt.run, attempt.number, index)
        text = self._keys.seal(purpose, json.dumps(event.to_json(), separators=(",", ":")))
        opened = event.session if isinstance(event, SessionOpening | StateForking) else ""
        sealed = self._keys.seal(session_purpose(attempt.tenant, attempt.run), opened) if opened else ""
        names = (self._deployment, attempt.tenant, attempt.run)
        # A resumed run opens its session again, so a new session is not progress. Otherwise a run that kills each
        # process at this point would be resumed without end.
        is_further = not isinstance(event, SessionOpening | StateForking)
        spending = self._spending.get(index, ReplySpending())
        reply = await _APPEND.run(
            self._client,
            run=run_key(*names),
            log=run_log_key(*names),
            sessions=run_sessions_key(*names),
            session_usage=session_usage_key(self._deployment, attempt.tenant, self.session or ""),
            account=account_key(*names[:2]),
            claim=attempt.claim,
            index=index,
            entry=text,
            sealed_session=sealed,
            ttl_s=RUN_TTL_S,
            is_progress=int(is_further),
            prefix=usage_prefix(self._deployment, attempt.tenant),
            has_session=int(self.session is not None),
            has_states=int(isinstance(event, StateForking)),
            **spending.arguments(),
        )
        self.has_grown = self.has_grown or is_further
        return reply.decode() if isinstance(reply, bytes) else str(reply)


async def read_entries(
    client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys, attempt: RunAttempt
) -> AsyncIterator[RunEvent]:
    """Yield the verified entries of a log, with only a page of them in memory. Raises the errors of `RunLog.load`."""
    key, count = run_log_key(deployment, attempt.tenant, attempt.run), 0
    while True:
        with broker_errors("the run's log was not read"):
            # In pages: an entry may have a megabyte, and Redis serves no other client while it reads.
            texts = await client.lrange(key, count, count + PAGE - 1)
        if not texts:
            return
        for entry in await in_tenant_thread(attempt.tenant, _open_entries, keys, attempt, count, texts):
            yield entry
        count += len(texts)


def _open_entries(keys: SigningKeys, attempt: RunAttempt, first: int, texts: Iterable[str | bytes]) -> list[RunEvent]:
    """Verify and parse entries of a log from the position `first` on. Raises ConfigError."""
    try:
        return [
            parse_entry(keys.unseal(entry_purpose(attempt.tenant, attempt.run, attempt.number, index), text))
            for index, text in enumerate(texts, first)
        ]
    except EnvelopeRefused as error:
        raise RecordRefused(
            f"the log of run {attempt.run} cannot be verified, so the run is not continued: retry the item. {error}"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"another release wrote the log of run {attempt.run}: finish the batch with that release, or retry the item"
        ) from error


def entry_purpose(tenant: str, run: str, attempt: int, index: int) -> str:
    """Return the signing purpose of the entry of an attempt at a position."""
    return f"log {tenant} {run} {attempt} {index}"


def session_purpose(tenant: str, run: str) -> str:
    """Return the signing purpose of the session of a run."""
    return f"session {tenant} {run}"


AT_ONCE = 100
SCAN_COUNT = 1000


async def close_left_sessions(
    client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys, tenant: str, runs: Iterable[str]
) -> int:
    """Close all sessions that these runs have opened or were about to open, including sessions of graders and of kept
    states. Return the number of these sessions. The hosts remove the sandboxes. Raises BrokerUnavailable when Redis
    does not answer.
    """
    names, store, count = list(runs), SessionStore(client, deployment), 0
    for at in range(0, len(names), AT_ONCE):
        some, pipe = names[at : at + AT_ONCE], client.pipeline(transaction=False)
        for run in some:
            pipe.smembers(run_sessions_key(deployment, tenant, run))
        with broker_errors("the sessions of runs were not read"):
            rows = await pipe.execute()
        for run, sealed in ((run, sealed) for run, row in zip(some, rows, strict=True) for sealed in row):
            try:
                # A session that this process cannot verify may belong to another run.
                session = keys.unseal(session_purpose(tenant, run), sealed)
            except EnvelopeRefused as error:
                log.error("run_session_refused", tenant=tenant, run=run, error=str(error))
                continue
            await store.close(tenant, session)
            count += 1
    return count


async def close_unused_sessions(client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys) -> int:
    """Close every open session that no unfinished run uses. Return the number of these sessions. The caller ensures
    that no host of the deployment has a sandbox: all of them were removed.

    A run that continues opens its session again, from the last checkpoint. Raises BrokerUnavailable.
    """
    with broker_errors("the open sessions were not read"):
        members: Any = await client.zrange(open_sessions_key(deployment), 0, -1)
        used = await _find_sessions_of_runs(client, deployment, keys) if members else set()
    store = SessionStore(client, deployment)
    unused = [name for member in members if (name := tuple(member.decode().split("|", 1))) not in used]
    for tenant, session in unused:
        await store.close(tenant, session)
    return len(unused)


async def _find_sessions_of_runs(
    client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys
) -> set[tuple[str, ...]]:
    """Return (tenant, session) of the sessions that unfinished runs have opened or were given."""
    found: set[tuple[str, ...]] = set()
    suffix = run_sessions_key(deployment, "", "").removeprefix(run_key(deployment, "", ""))
    async for key in client.scan_iter(run_key(deployment, "*", "*"), count=SCAN_COUNT, _type="hash"):
        name = key.decode()
        tenant, run = name.removeprefix(tenant_key(deployment, "", "").rpartition(":")[0]).split(":run.")
        fields: list[Any] = await client.hmget(name, ["state", "session"])
        state, given = fields
        if state == b"ended":
            continue
        found |= {(tenant, given.decode())} if given else set()
        for sealed in await client.smembers(name + suffix):
            with suppress(EnvelopeRefused):
                found.add((tenant, keys.unseal(session_purpose(tenant, run), sealed)))
    return found


# --- Transcripts ------------------------------------------------------------------------------------------------------


def pack_transcript(messages: JsonValue) -> bytes:
    """Return the messages in stored form; b"" if they are too large."""
    try:
        text = json.dumps(messages, allow_nan=False)
    except ValueError:
        # JSON has no NaN and no Infinity, and the text is sent to clients as it is.
        text = json.dumps(json.loads(json.dumps(messages), parse_constant=lambda _: None))
    if len(text) > MAX_TRANSCRIPT_BYTES or has_more_values_in_text(text, MAX_TRANSCRIPT_VALUES):
        return b""
    return zlib.compress(text.encode(), 3)


PIECE_BYTES, PACKED_PIECE_BYTES = 64 * 1024, 256 * 1024


def inflate_transcript(run: str, packed: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the JSON text of a stored transcript, which is read in pieces, in pieces. Raises ConfigError: the data is
    damaged, or longer than a transcript can be.
    """
    inflater, size = zlib.decompressobj(), 0
    try:
        for rest in packed:
            if inflater.eof:
                break
            while piece := inflater.decompress(rest, PIECE_BYTES):
                rest, size = inflater.unconsumed_tail, size + len(piece)
                if size > MAX_TRANSCRIPT_BYTES:
                    raise _build_damaged_error(run)
                yield piece
    except zlib.error:
        raise _build_damaged_error(run) from None
    if not inflater.eof:
        raise _build_damaged_error(run)


def measure_transcript(run: str, packed: Iterable[bytes]) -> int:
    """Return the length of the JSON text of a stored transcript, in bytes, without keeping the text. Raises
    ConfigError, as `inflate_transcript`.
    """
    return sum(len(piece) for piece in inflate_transcript(run, packed))


def _build_damaged_error(run: str) -> ConfigError:
    return ConfigError(f"the transcript of run {run} in Redis is damaged: read the events of the run instead")


def unpack_transcript(run: str, packed: bytes) -> list[dict[str, Any]]:
    """Return the messages that `pack_transcript` stored, with bounded memory use. Raises ConfigError: any other data.
    Every process that can write to Redis may have stored the data.
    """
    inflater = zlib.decompressobj()
    try:
        # Decompressed with a limit, because some kilobytes of zeros would become gigabytes. The number of values limits
        # the memory that the parsed JSON needs.
        text = inflater.decompress(packed, MAX_TRANSCRIPT_BYTES).decode()
        if not inflater.eof or has_more_values_in_text(text, MAX_TRANSCRIPT_VALUES):
            raise ValueError("it is cut off, or larger than a transcript may be")
        messages = json.loads(text)
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ValueError("it is not a list of messages")
    except (zlib.error, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the transcript of run {run} in Redis cannot be read ({error}): run the same release everywhere, and "
            "check which process writes to this Redis. If the run was traced, its trace has the messages "
            "(docs/observe.md)"
        ) from error
    return messages
