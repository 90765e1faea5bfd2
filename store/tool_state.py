"""Values that the tools of a session share between calls and workers: one hash for each session.

Invariant: `update` stores a value only if its version has not changed since it was read. No update is lost.
"""

import contextlib
import copy
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.functions.session_state import (
    MAX_ATTEMPTS,
    MAX_STATE_BYTES,
    MAX_VALUE_BYTES,
    Change,
    contention_error,
    encode_value,
    is_key,
    state_full_error,
)
from toolcrew.contract.names import account_key, server_sessions_key, session_state_key
from toolcrew.store.connection import SyncRedis, broker_errors, connect_once
from toolcrew.store.memory import MEMORY_LUA, no_memory
from toolcrew.store.scripts import Script

STATE_TTL_S = 24 * 3600
"""Lifetime of a state after its last read or change, in seconds."""

_ENTRY = b"="
"""Prefix of every key, so that no key collides with the field `size`."""

# A value is stored as "<version> <JSON>". `expected`: the expected version; '' for any. `limit`: of the whole state.
_STORE = Script(
    MEMORY_LUA
    + """
local before, version, freed = redis.call('HGET', state, field), 0, 0
if before then
  local space = string.find(before, ' ', 1, true)
  version = tonumber(string.sub(before, 1, space - 1))
  freed = #before - space + tonumber(key_bytes)
end
if expected ~= '' and tonumber(expected) ~= version then return {'changed', version} end
local size = tonumber(redis.call('HGET', state, 'size') or '0') + #value + tonumber(key_bytes) - freed
if size > tonumber(limit) then return {'full', size} end
local now = read_time()
if #value > freed and not has_room(account, now, RUNNING_WORK) then return {'memory', size} end
redis.call('HSET', state, field, string.format('%d %s', version + 1, value), 'size', string.format('%d', size))
redis.call('EXPIRE', state, ttl_s)
set_bytes(account, now, state, 'bytes', size + RECORD_BYTES, now + ttl_s)
return {'stored', version + 1}
""",
    keys=("state", "account"),
    args=("field", "expected", "value", "key_bytes", "limit", "ttl_s"),
)
# A state that was read expires later.
_EXTEND = Script(
    MEMORY_LUA
    + """
if redis.call('EXPIRE', state, ttl_s) == 1 then
  local now = read_time()
  set_bytes(account, now, state, 'bytes', counted_bytes(state, 'bytes'), now + ttl_s)
end
""",
    keys=("state", "account"),
    args=("ttl_s",),
)

_REMOVE = Script(
    MEMORY_LUA
    + """
set_bytes(account, read_time(), state, 'bytes', 0)
redis.call('DEL', state)
""",
    keys=("state", "account"),
)


@dataclass(frozen=True)
class StateStore:
    """The states of a deployment. `client` must never repeat a command, because an update could then count twice."""

    client: SyncRedis
    deployment: str
    max_value_bytes: int = MAX_VALUE_BYTES
    max_state_bytes: int = MAX_STATE_BYTES

    @classmethod
    def of(cls, broker: BrokerSettings) -> "StateStore":
        return cls(connect_once(broker), broker.deployment)

    def open(self, tenant: str, session: str) -> "RedisState":
        """Return the object that reads and changes the state of one session. Tenant and session must come from the
        signed context of the call.
        """
        return self._at(session_state_key(self.deployment, tenant, session), tenant)

    def open_server_sessions(self, tenant: str, session: str) -> "RedisState":
        """Return the same for the MCP sessions of a session (workers/mcp/http_sessions.py), which tools do not see."""
        return self._at(server_sessions_key(self.deployment, tenant, session), tenant)

    def remove_server_sessions(self, tenant: str, session: str) -> None:
        """Delete the record of the MCP sessions of a closed session. Raises ToolFailure, as the states do."""
        with _state_errors():
            _REMOVE.run_blocking(
                self.client,
                state=server_sessions_key(self.deployment, tenant, session),
                account=account_key(self.deployment, tenant),
            )

    def _at(self, key: str, tenant: str) -> "RedisState":
        return RedisState(self, key, account_key(self.deployment, tenant))


class RedisState:
    """The state of one session. Commands block the event loop. This is acceptable, because a process runs one call at
    a time. A connection for each event loop would cost ten times as much as the commands.

    Raises ToolFailure(OUTCOME_UNKNOWN): Redis does not answer. Earlier effects of the tool remain.
    """

    def __init__(self, store: StateStore, key: str, account: str) -> None:
        self._store = store
        self._key = key
        self._account = account

    async def get(self, key: str, default: Any = None) -> Any:
        entry = self._read(key)
        return copy.copy(default) if entry is None else json.loads(entry[1])

    async def set(self, key: str, value: Any) -> None:
        self._write(key, encode_value(key, value, self._store.max_value_bytes), None)

    async def update(self, key: str, fn: Change) -> Any:
        for _ in range(MAX_ATTEMPTS):
            version, text = self._read(key) or (0, "null")
            value = fn(json.loads(text))
            if inspect.isawaitable(value):
                value = await value
            text = encode_value(key, value, self._store.max_value_bytes)
            if self._write(key, text, version):
                return json.loads(text)
        raise contention_error(key)

    async def items(self) -> dict[str, Any]:
        with _state_errors(), self._store.client.pipeline(transaction=True) as pipe:
            pipe.hgetall(self._key)
            _EXTEND.add_to(pipe, state=self._key, account=self._account, ttl_s=STATE_TTL_S)
            items, _ = pipe.execute()
        entries = {
            name[len(_ENTRY) :].decode(): _parsed(entry)[1] for name, entry in items.items() if name.startswith(_ENTRY)
        }
        return {key: json.loads(text) for key, text in entries.items()}

    def _read(self, key: str) -> tuple[int, str] | None:
        """Return version and text of a value; None if there is none."""
        if not is_key(key):
            return None
        with _state_errors(), self._store.client.pipeline(transaction=False) as pipe:
            pipe.hget(self._key, _field(key))
            _EXTEND.add_to(pipe, state=self._key, account=self._account, ttl_s=STATE_TTL_S)
            entry, _ = pipe.execute()
        return None if entry is None else _parsed(entry)

    def _write(self, key: str, text: str, version: int | None) -> bool:
        """Store a value. Return False if another call has changed it since `version`."""
        expected = b"" if version is None else b"%d" % version
        with _state_errors():
            verdict, number = _STORE.run_blocking(
                self._store.client,
                state=self._key,
                account=self._account,
                field=_field(key),
                expected=expected,
                value=text.encode(),
                key_bytes=len(key.encode()),
                limit=self._store.max_state_bytes,
                ttl_s=STATE_TTL_S,
            )
        if verdict == b"memory":
            raise no_memory("the value was not stored")
        if verdict == b"full":
            raise state_full_error(key, int(number), self._store.max_state_bytes)
        return bool(verdict == b"stored")


def _field(key: str) -> bytes:
    return _ENTRY + key.encode()


def _parsed(entry: bytes) -> tuple[int, str]:
    version, _, text = entry.partition(b" ")
    return int(version), text.decode()


@contextlib.contextmanager
def _state_errors() -> Iterator[None]:
    try:
        with broker_errors("the session's state cannot be reached"):
            yield
    except BrokerUnavailable as error:
        raise ToolFailure(ErrorCode.OUTCOME_UNKNOWN, f"{error}. The tool's earlier effects remain") from error
