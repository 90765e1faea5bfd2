"""The log of one run in Redis. Only the holder of the run appends entries, in order.

Invariant: an event takes effect only after its entry is in the log. Another process can therefore resume the run.

Each entry is signed for its tenant, run, attempt and position. Without signatures, a forged reply could make an
orchestrator send calls, and a forged result could hide that a call did not run. A process without the secret can only
remove entries, or restore earlier genuine entries at their own positions.

The transcript of a hosted run contains its messages, and is stored after the end of the run. The transcript is only
shown, so it is not signed.
"""

import asyncio
import json
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from pydantic import JsonValue

from contract.errors import BrokerUnavailable, ConfigError, EnvelopeRefused, RecordRefused
from contract.json_limits import has_more_values_in_text
from contract.names import tenant_key
from contract.run_events import (
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
from contract.signing import SigningKeys
from store.batches import RUN_TTL_S
from store.connection import SharedClock, broker_errors
from store.sessions import SessionStore
from store.usage import USAGE_LUA, ReplySpending, session_usage_key, usage_prefix
from telemetry.logs import get_logger

log = get_logger(__name__)

MAX_TRANSCRIPT_BYTES = 64 * 1024 * 1024
"""Limit of a transcript as JSON, in bytes. A longer transcript is not stored; the log of its run is read instead."""
MAX_TRANSCRIPT_VALUES = 200_000


def run_key(deployment: str, tenant: str, run: str) -> str:
    """Return the key of the hash of a run (store/runs.py)."""
    return tenant_key(deployment, tenant, f"run.{run}")


def run_log_key(deployment: str, tenant: str, run: str) -> str:
    """Return the key of the list of a run's entries."""
    return tenant_key(deployment, tenant, f"run.{run}:log")


def run_parts_key(deployment: str, tenant: str, run: str) -> str:
    """Return the key of the hash of entries that are too large for the list, by their positions."""
    return tenant_key(deployment, tenant, f"run.{run}:parts")


LOGGED = (
    SessionOpening, SessionOpened, ModelReplied, CallReviewed, CallFinished, StateForking, StateKept, ArtifactsCopied,
    SubmissionTaken,
)  # fmt: skip
"""The events from which another process resumes a run."""


@dataclass(frozen=True)
class LogEntry:
    """An event of a log. `wall_s`: the working time of the run until the event, in seconds. The setup and the time
    without a holder do not count.
    """

    event: RunEvent
    wall_s: float = 0.0

    def to_text(self) -> str:
        """Return the JSON that is signed."""
        return json.dumps({"wall_s": self.wall_s, "event": self.event.to_json()}, separators=(",", ":"))


def parse_entry(text: str | bytes) -> LogEntry:
    """Return the entry in a text. Raises ValueError: another release wrote the entry."""
    data = json.loads(text)
    event = parse_event(data["event"]) if isinstance(data, dict) and isinstance(data.get("event"), dict) else None
    if not isinstance(event, LOGGED):
        raise ValueError("the entry is not an event of a run log")
    return LogEntry(event, float(data.get("wall_s", 0.0)))


INLINE_BYTES = 64 * 1024
"""Limit of an entry in the list, in bytes. A larger entry is stored in a separate hash."""
_ARTIFACTS = "artifacts"
"""The field of the separate hash with the archive that waits for the grader."""
RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
# KEYS: run, log, parts, usage of the run's session. ARGV: claim, index, entry, part ('' for none), time to live, '1' if
# the entry is progress of the run, prefix of the tenant's days, whether there is a session, tokens and cost, '1' if the
# run keeps states. Returns
# `added`; `there` (an earlier try added the entry, and its reply was lost); `taken` (another process holds the run); or
# the number of entries, if Redis has lost the last entries.
_APPEND = (
    USAGE_LUA
    + """
if redis.call('HGET', KEYS[1], 'claim') ~= ARGV[1] then return 'taken' end
local length, index = redis.call('LLEN', KEYS[2]), tonumber(ARGV[2])
if length > index then return 'there' end
if length < index then return tostring(length) end
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[3], ARGV[2], ARGV[4])
  redis.call('EXPIRE', KEYS[3], ARGV[5])
end
redis.call('RPUSH', KEYS[2], ARGV[3])
count_reply(ARGV[7], ARGV[8] == '1' and KEYS[4], unpack(ARGV, 9, 12))
if ARGV[6] == '1' then redis.call('HDEL', KEYS[1], 'losses') end
if ARGV[13] == '1' then redis.call('HSET', KEYS[1], 'has_states', '1') end
redis.call('EXPIRE', KEYS[1], ARGV[5])
redis.call('EXPIRE', KEYS[2], ARGV[5])
return 'added'
"""
)


class RunTaken(Exception):
    """Another process holds the run now. The former holder must stop."""


@dataclass(frozen=True)
class RunAttempt:
    """An attempt at a run. `claim`: the token with which the holder appends to the log; empty for a reader."""

    tenant: str
    run: str
    number: int
    claim: str = ""


class RunLog:
    """The log of one run in the memory of its holder. `entries`: the entries of former holders, then its own. `clock`:
    Redis's clock.
    """

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        deployment: str,
        keys: SigningKeys,
        attempt: RunAttempt,
        entries: list[LogEntry],
        clock: SharedClock,
    ) -> None:
        self.clock = clock
        self._client = client
        self._append = client.register_script(_APPEND)
        self._parts_key = run_parts_key(deployment, attempt.tenant, attempt.run)
        self._deployment, self._keys, self._attempt = deployment, keys, attempt
        self.run = attempt.run
        self.entries = entries
        self.session: str | None = None
        """The session for which the tokens of new entries count."""
        self._spending: dict[int, ReplySpending] = {}
        self.has_grown = False
        """True if the run has made progress under this holder."""
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    async def load(
        cls, client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys, attempt: RunAttempt
    ) -> "RunLog":
        """Load the log of an attempt. Raises BrokerUnavailable when Redis does not answer. Raises ConfigError: the log
        cannot be verified or read.
        """
        tenant, run = attempt.tenant, attempt.run
        clock = SharedClock()
        with broker_errors("the run's log was not read"):
            seconds, micros = await client.time()
            clock.learn(seconds + micros / 1e6)
            # Large parts are read afterwards. An entry is added in one step with its part, so the part is there.
            items: Any = await client.lrange(run_log_key(deployment, tenant, run), 0, -1)
            texts = [await _whole(client, deployment, tenant, run, index, item) for index, item in enumerate(items)]
        try:
            opened = [
                keys.unseal(entry_purpose(tenant, run, attempt.number, index), text) for index, text in enumerate(texts)
            ]
            entries = [parse_entry(text) for text in opened]
        except EnvelopeRefused as error:
            raise RecordRefused(
                f"the log of run {run} cannot be verified, so the run is not continued: retry the item. {error}"
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"another release wrote the log of run {run}: finish the batch with that release, or retry the item"
            ) from error
        return cls(client, deployment, keys, attempt, entries, clock)

    async def append(self, entry: LogEntry, spending: ReplySpending | None = None) -> None:
        """Append an entry, and count `spending` in the same step. Wait while Redis does not answer. Raises RunTaken:
        another process holds the run.
        """
        # Calls of one step run at the same time. The position is a part of the signature, so entries must not race for
        # it.
        async with self._one_at_a_time:
            # In memory first. If this task is cancelled below, the next append adds this entry, too, or finds it there.
            self.entries.append(entry)
            index, failures = len(self.entries) - 1, 0
            if spending is not None:
                self._spending[index] = spending
            while index < len(self.entries):
                try:
                    with broker_errors("the entry was not added"):
                        reply = await self._add(index)
                except BrokerUnavailable as error:
                    log.warning("run_log_unanswered", run=self._attempt.run, error=str(error))
                    await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
                    failures += 1
                    continue
                # The new holder continues from the entries that are there. Nothing that this one still does has an
                # effect.
                if reply == "taken":
                    raise RunTaken(self._attempt.run)
                # If Redis has lost entries, the holder adds them again from memory.
                index = index + 1 if reply in ("added", "there") else int(reply)

    async def keep_artifacts(self, archive: bytes) -> None:
        """Store the archive that waits for the grader, next to the log. Raises BrokerUnavailable."""
        # A transaction: without its time to live, an archive would stay permanently. Not signed: the log entry has its
        # hash.
        pipe = self._client.pipeline(transaction=True)
        pipe.hset(self._parts_key, _ARTIFACTS, archive)
        pipe.expire(self._parts_key, RUN_TTL_S)
        with broker_errors("the artifacts were not stored"):
            await pipe.execute()

    async def load_artifacts(self) -> bytes | None:
        """Return the archive; None if it is no longer stored. The caller checks its hash. Raises BrokerUnavailable."""
        with broker_errors("the artifacts were not read"):
            archive: Any = await self._client.hget(self._parts_key, _ARTIFACTS)
        return archive if isinstance(archive, bytes) else None

    async def drop_artifacts(self) -> None:
        """Delete the archive. If Redis does not answer, it expires with the log."""
        with suppress(BrokerUnavailable), broker_errors("the artifacts were not deleted"):
            await self._client.hdel(self._parts_key, _ARTIFACTS)

    async def _add(self, index: int) -> str:
        attempt = self._attempt
        purpose = entry_purpose(attempt.tenant, attempt.run, attempt.number, index)
        text = self._keys.seal(purpose, self.entries[index].to_text())
        # Readers that look for sessions read pages of many logs, and must not load large results with them.
        item, part = text, ""
        if len(text.encode()) > INLINE_BYTES:
            item, part = json.dumps({"part": index}), text
        names = (self._deployment, attempt.tenant, attempt.run)
        # A resumed run opens its session again, so a new session is not progress. Otherwise a run that kills every
        # holder at this point would be resumed without end.
        event = self.entries[index].event
        is_further = not isinstance(event, SessionOpening | StateForking)
        spent = self._spending.get(index, ReplySpending())
        prefix, has_session = usage_prefix(self._deployment, attempt.tenant), int(self.session is not None)
        session = session_usage_key(self._deployment, attempt.tenant, self.session or "")
        reply = await self._append(
            keys=[run_key(*names), run_log_key(*names), run_parts_key(*names), session],
            args=[
                attempt.claim,
                index,
                item,
                part,
                RUN_TTL_S,
                "1" if is_further else "0",
                prefix,
                has_session,
                *spent.amounts(),
                "1" if isinstance(event, StateForking) else "0",
            ],
        )
        self.has_grown = self.has_grown or is_further
        return reply.decode() if isinstance(reply, bytes) else str(reply)


def entry_purpose(tenant: str, run: str, attempt: int, index: int) -> str:
    """Return the signing purpose of the entry of an attempt at a position."""
    return f"log {tenant} {run} {attempt} {index}"


async def _whole(
    client: "redis.asyncio.Redis", deployment: str, tenant: str, run: str, index: int, item: bytes
) -> bytes:
    """Return the text of an entry, which may be stored in the separate hash."""
    if not item.startswith(b'{"part"'):
        return item
    text: Any = await client.hget(run_parts_key(deployment, tenant, run), str(index))
    if not isinstance(text, bytes):
        raise ConfigError(
            f"a part of the log of run {run} is missing in Redis: check that Redis evicts no keys, then retry the item"
        )
    return text


AT_ONCE = 100
PAGE = 16
"""Number of entries of a log that are read at a time. The entries of the session come first. There are two of them, or
more if processes died while they opened the session.
"""


async def close_left_sessions(
    client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys, tenant: str, runs: Iterable[str]
) -> int:
    """Close the sessions of these runs. Return how many sessions their logs contain. The hosts remove the sandboxes.
    Raises BrokerUnavailable when Redis does not answer.
    """
    names, store = list(runs), SessionStore(client, deployment)
    count = 0
    for at in range(0, len(names), AT_ONCE):
        for session in await _find_sessions(client, deployment, keys, tenant, names[at : at + AT_ONCE]):
            await store.close(tenant, session)
            count += 1
    return count


async def _find_sessions(
    client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys, tenant: str, runs: Sequence[str]
) -> list[str]:
    """Return all sessions that were opened or were about to be opened. Their entries are at the beginning of a log;
    entries of the grader are at the end; entries of kept states are anywhere.
    """
    sessions: list[str] = []
    # The start and the end of each log, so that a run with thousands of entries costs two pages.
    for run, (attempt, first, items) in zip(runs, await _read_ends(client, deployment, tenant, runs), strict=True):
        found = [_session_of(keys, tenant, run, attempt, first + at, item) for at, item in enumerate(items)]
        sessions += [session for session in found if session is not None]
    first = 0
    while runs:
        pages = await _read(client, deployment, tenant, runs, first)
        session_pages = [
            [_session_of(keys, tenant, run, attempt, first + at, item) for at, item in enumerate(items)]
            for run, (attempt, _, items) in zip(runs, pages, strict=True)
        ]
        sessions += [session for page in session_pages for session in page if session is not None]
        # After a page that contains only entries of sessions, more such entries may follow.
        runs = [
            run
            for run, (_, has_states, _), page in zip(runs, pages, session_pages, strict=True)
            if len(page) == PAGE and (has_states or None not in page)
        ]
        first += PAGE
    return list(dict.fromkeys(sessions))


async def _read(
    client: "redis.asyncio.Redis", deployment: str, tenant: str, runs: Sequence[str], first: int
) -> list[tuple[int, bool, list[bytes]]]:
    """Return a page of each run's log, with the attempt of the run, and whether it has kept states."""
    pipe = client.pipeline(transaction=False)
    for run in runs:
        pipe.hmget(run_key(deployment, tenant, run), "attempt", "has_states")
        pipe.lrange(run_log_key(deployment, tenant, run), first, first + PAGE - 1)
    with broker_errors("the sessions of runs were not read"):
        replies: list[Any] = await pipe.execute()
    rows = zip(replies[::2], replies[1::2], strict=True)
    return [(int(attempt or 1), bool(has_states), items) for (attempt, has_states), items in rows]


async def _read_ends(
    client: "redis.asyncio.Redis", deployment: str, tenant: str, runs: Sequence[str]
) -> list[tuple[int, int, list[bytes]]]:
    """Return the last page of each run's log, with the attempt of the run and the position of the page."""
    # A transaction, because the position of an entry is computed from the length, and decides whether it can be
    # verified.
    pipe = client.pipeline(transaction=True)
    for run in runs:
        pipe.hget(run_key(deployment, tenant, run), "attempt")
        pipe.llen(run_log_key(deployment, tenant, run))
        pipe.lrange(run_log_key(deployment, tenant, run), -PAGE, -1)
    with broker_errors("the sessions of runs were not read"):
        replies: list[Any] = await pipe.execute()
    rows = zip(replies[::3], replies[1::3], replies[2::3], strict=True)
    return [(int(attempt or 1), max(0, length - len(items)), items) for attempt, length, items in rows]


def _session_of(keys: SigningKeys, tenant: str, run: str, attempt: int, index: int, item: bytes) -> str | None:
    """Return the session in an entry of a log; None for other entries. An entry that this process cannot verify must
    not close a session.
    """
    try:
        entry = parse_entry(keys.unseal(entry_purpose(tenant, run, attempt, index), item))
    except (EnvelopeRefused, ValueError) as error:
        if not item.startswith(b'{"part"'):
            log.error("run_log_entry_refused", tenant=tenant, run=run, error=str(error))
        return None
    return entry.event.session if isinstance(entry.event, SessionOpening | SessionOpened | StateForking) else None


# --- Transcripts ------------------------------------------------------------------------------------------------------


def pack_transcript(messages: JsonValue) -> bytes:
    """Return the messages in stored form; b"" if they are too large."""
    text = json.dumps(messages)
    if len(text) > MAX_TRANSCRIPT_BYTES or has_more_values_in_text(text, MAX_TRANSCRIPT_VALUES):
        return b""
    return zlib.compress(text.encode(), 3)


def unpack_transcript(run: str, packed: bytes) -> list[dict[str, Any]]:
    """Return the messages that `pack_transcript` stored, with bounded memory use. Raises ConfigError: any other data.
    Every process that can write to Redis may have stored the data.
    """
    inflater = zlib.decompressobj()
    try:
        # With a limit: some kilobytes of zeros would become gigabytes. The count of values bounds what JSON needs in
        # memory.
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
