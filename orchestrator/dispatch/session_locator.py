"""Finds the host of a session for every call. Chooses a host for a new session, and another host when the session's
host is lost or drains.

Invariant: at most one host serves a session. A location has a fencing token. Only a process that knows the current
fence may open the session or change its location, and every change of the host raises the fence. This process decides
nothing alone: it proposes a host, and a script in Redis accepts the proposal only if the fence is still the one that
this process has read.
"""

import asyncio
import contextlib
import json
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from toolcrew.contract.calls import LONGEST_TIMEOUT_S, MAX_TIMEOUT_S, ToolCall, ToolResult
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.hosts import HostReport
from toolcrew.contract.names import HOST_QUEUES, POOL_QUEUES
from toolcrew.contract.session_locations import (
    LOCATION_MARGIN_S,
    LocationState,
    SessionLocation,
    open_checkpoint,
    open_start,
    seal_start,
)
from toolcrew.contract.session_spec import SessionMove, SessionSpec
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.specs import ToolSpec
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.dispatch.placement import (
    LOW_MEMORY_BYTES,
    HostCapacity,
    HostRequirements,
    NoHost,
    choose_host,
    find_capacity,
)
from toolcrew.orchestrator.dispatch.transport import CallLost
from toolcrew.store.call_messages import NotSent
from toolcrew.store.sessions import SessionAddress, SessionStore
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_HOSTS = 3
"""Maximum number of hosts on which the opening of one session is tried."""
SETTLE_S = 30.0
"""Seconds that a call waits if the host of its session does not report, or if another process is moving the session.
A new session waits as long for a host that starts or does not report.
"""
POLL_S = 0.2
MAX_CACHED = 100_000
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class HostSource(Protocol):
    """Source of the reports of live hosts."""

    async def reports(self) -> list[HostReport]:
        """Return the last report of each living worker. Raises BrokerUnavailable."""
        ...

    async def silent(self) -> list[str]:
        """Return the queues of workers that do not report now and may report again. Raises BrokerUnavailable."""
        ...


@dataclass(frozen=True)
class OpenRequest:
    """A session that is being opened. `moved`: set when another host had it."""

    tenant: str
    session: str
    spec: SessionSpec
    moved: SessionMove | None = None


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_Claimed = TypeVar("_Claimed", bound=SessionAddress | None)
SendOpen = Callable[[OpenRequest, SessionAddress], Awaitable[ToolResult]]
"""Function that sends the call `session.open` to an address once and returns its result, even if the call failed.
Raises NotSent, CallLost, DeliveryFailed.
"""


class SessionLocator:
    """Finds the addresses of sessions. Addresses are cached, and read again when a fence has changed."""

    def __init__(self, sessions: SessionStore, hosts: HostSource, send_open: SendOpen, keys: SigningKeys) -> None:
        self._sessions = sessions
        self._keys = keys
        self._hosts = hosts
        self._send_open = send_open
        # A cached address may be out of date. The publish script compares its fence, so a call with an old address is
        # never sent to the host.
        self._addresses: dict[tuple[str, str], SessionAddress] = {}
        # Sessions without a configuration of tools, so that their calls do not read it.
        self._unconfigured: dict[tuple[str, str], None] = {}
        self._placed: Counter[str] = Counter()
        self._reported_at: dict[str, float] = {}

    async def start(self, tenant: str, session: str) -> SessionSpec:
        """Return the options with which an open session was opened. Raises ToolFailure(SESSION_NOT_FOUND),
        OperatorError.
        """
        return open_start(self._keys, tenant, session, await self.location(tenant, session))

    async def call_fields(self, tenant: str, session: str, spec: ToolSpec) -> dict[str, Any]:
        """Return the fields of a call's context that come from its session: the tool's `config`, and for a tool outside
        of the sandbox the session's folder as `cwd`. Raises BrokerUnavailable, SandboxUnavailable.
        """
        is_outside = spec.pool in POOL_QUEUES
        if not is_outside and (tenant, session) in self._unconfigured:
            return {}
        location = await self._sessions.find(tenant, session)
        if location is None:
            return {}
        config = open_start(self._keys, tenant, session, location).tool_config
        if not config:
            _add_bounded(self._unconfigured, (tenant, session), None)
        cwd = {"cwd": location.folder} if is_outside and location.folder else {}
        return {"config": config.get(spec.name, {}), **cwd}

    async def open(self, tenant: str, session: str, policy: TenantPolicy, spec: SessionSpec) -> ToolResult:
        """Open a new session on a host with free capacity. Waits for a host that starts or does not report. Raises
        ToolFailure(QUOTA_EXCEEDED), SandboxUnavailable.
        """
        excluded: set[str] = set()
        queue = await self._await_host(lambda: self._choose(policy, spec, excluded))
        start = seal_start(self._keys, tenant, session, spec)
        address = await self._count_claim(
            queue, self._sessions.open(tenant, session, queue, start=start, ttl_s=spec.ttl_s, limit=policy.sandboxes)
        )
        try:
            result, _ = await self._send_to_hosts(OpenRequest(tenant, session, spec), address, policy, excluded)
        except BaseException:
            # No caller knows the name of this session, so its location must not count towards the tenant's limit.
            await asyncio.shield(self._forget_quietly(tenant, session))
            raise
        if not result.success:
            await self._forget_quietly(tenant, session)
        return result

    async def find(self, tenant: str, session: str, policy: TenantPolicy) -> SessionAddress:
        """Return the session's address. If the session has none, open the session on another host. Raises
        ToolFailure(SESSION_NOT_FOUND), SandboxUnavailable.
        """
        return self._addresses.get((tenant, session)) or await self._await_address(tenant, session, policy, None)

    async def refresh(
        self, tenant: str, session: str, failed: SessionAddress, policy: TenantPolicy, *, is_lost: bool
    ) -> SessionAddress:
        """Return the address after a call could not be sent to `failed`. `is_lost`: the host does not report. Once
        the host is given up, the session is opened on another host.
        """
        self._addresses.pop((tenant, session), None)
        return await self._await_address(tenant, session, policy, failed if is_lost else None)

    async def _await_address(
        self, tenant: str, session: str, policy: TenantPolicy, silent: SessionAddress | None
    ) -> SessionAddress:
        """Return the address as soon as the session has one and its host is not `silent`."""
        until = time.monotonic() + SETTLE_S
        while True:
            # Read again in each round: while this call waits, another one may move the session, or its user may close
            # it.
            location = await self._sessions.find(tenant, session)
            if location is None:
                raise no_such_session()
            # Read the clock before the attempt, so that the last attempt may take longer than the limit.
            is_late = time.monotonic() > until
            try:
                address = await self._find_address(tenant, session, location, policy, silent)
            except NoHost:
                # A restarted host takes its sessions back, so wait for it. Other hosts rarely get capacity, so the wait
                # has a limit.
                if is_late:
                    raise
                address = None
            if address is not None:
                return address
            if is_late:
                raise SandboxUnavailable(
                    f"the session is still being moved after {SETTLE_S:g} s; try again, and see `toolcrew hosts list`"
                )
            await asyncio.sleep(POLL_S)

    async def _find_address(
        self, tenant: str, session: str, location: SessionLocation, policy: TenantPolicy, silent: SessionAddress | None
    ) -> SessionAddress | None:
        """Return the address if the session has one now, else None."""
        if location.state is LocationState.MOVING:
            return await self._move(tenant, session, location, policy)
        # With another fence, the session has moved since the call failed, and its former host was silent.
        is_silent = silent is not None and location.fence == silent.fence
        host_state = await self._sessions.host_state(location.queue) if is_silent else "alive"
        if host_state == "given_up":
            return await self._move(tenant, session, location, policy)
        return (
            self._cache_address(tenant, session, SessionAddress(location.queue, location.fence))
            if host_state == "alive"
            else None
        )

    async def add_forks(
        self, tenant: str, session: str, names: Sequence[str], policy: TenantPolicy, facts: Mapping[str, Any]
    ) -> None:
        """Create the locations of the sessions that a host has forked from a session. `facts`: the report of the host.
        Raises ToolFailure(QUOTA_EXCEEDED), SandboxUnavailable, BrokerUnavailable.
        """
        spec, queue = await self.start(tenant, session), str(facts["queue"])
        # Sign the options separately for each new session, because a signature is valid for one session only.
        starts = {name: seal_start(self._keys, tenant, name, spec) for name in names}
        await self._sessions.fork(tenant, session, starts, queue, facts=json.dumps(dict(facts)), limit=policy.sandboxes)
        for name in names:
            self._cache_address(tenant, name, SessionAddress(queue, 1))

    async def find_for_closing(self, tenant: str, session: str) -> SessionAddress | None:
        """Return the address of a session without opening it; None when no host has it. Waits while its host does not
        report, or while another process moves the session.
        """
        until = time.monotonic() + SETTLE_S
        while (location := await self._sessions.find(tenant, session)) is not None and time.monotonic() < until:
            if location.state is LocationState.OPEN:
                host_state = await self._sessions.host_state(location.queue)
                if host_state != "silent":
                    return SessionAddress(location.queue, location.fence) if host_state == "alive" else None
            elif not location.moving_until:
                return None
            await asyncio.sleep(POLL_S)
        return None

    async def location(self, tenant: str, session: str) -> SessionLocation:
        """Return the location of an open session, no matter which process opened it. Raises
        ToolFailure(SESSION_NOT_FOUND), BrokerUnavailable.
        """
        # A client chose the name, which becomes a part of a key.
        location = await self._sessions.find(tenant, session) if _NAME.fullmatch(session) else None
        if location is None:
            raise no_such_session()
        return location

    async def set_ttl(self, tenant: str, session: str, ttl_s: float) -> SessionLocation:
        """Change the time to live in the location of an open session, and return the location. Its host does not know
        the change yet. Raises ToolFailure(SESSION_NOT_FOUND), OperatorError.
        """
        longest_s = float((await self.facts(tenant, session) or {}).get("timeout_s", LONGEST_TIMEOUT_S))
        while True:
            location = await self.location(tenant, session)
            spec = open_start(self._keys, tenant, session, location).model_copy(update={"ttl_s": ttl_s})
            start = seal_start(self._keys, tenant, session, spec)
            # The location must live as long as the longest call. Another process may change it at the same time.
            life_s = math.ceil(ttl_s + max(0.0, longest_s - MAX_TIMEOUT_S)) + LOCATION_MARGIN_S
            if await self._sessions.set_ttl(tenant, session, location.start, start, ttl_s=ttl_s, life_s=life_s):
                return location.model_copy(update={"ttl_s": ttl_s, "start": start})

    async def facts(self, tenant: str, session: str) -> dict[str, Any] | None:
        """Return the facts that the host reported when it opened the session; None if they are not stored. Raises
        BrokerUnavailable.
        """
        facts = json.loads(await self._sessions.facts(tenant, session) or "null")
        return facts if isinstance(facts, dict) else None

    def last_used(self, tenant: str, session: str) -> SessionAddress | None:
        """Return the address that the last call of the session used."""
        return self._addresses.get((tenant, session))

    async def last(self, tenant: str, session: str) -> SessionAddress | None:
        """Return the last address of a session, even if its host was lost; None if there is no such session. Raises
        BrokerUnavailable.
        """
        location = None if (tenant, session) in self._addresses else await self._sessions.find(tenant, session)
        return self.last_used(tenant, session) or (
            SessionAddress(location.queue, location.fence) if location is not None else None
        )

    async def forget(self, tenant: str, session: str) -> bool:
        """Delete the address of a session that is closed. Return whether the session has MCP sessions at servers.
        Raises BrokerUnavailable.
        """
        self._addresses.pop((tenant, session), None)
        return await self._sessions.close(tenant, session)

    async def any_queue(self, policy: TenantPolicy) -> str:
        """Return the queue of any host, for work that every host can do. Raises SandboxUnavailable."""

        async def choose() -> str:
            return choose_host(await self._hosts.reports(), HostRequirements(policy.sandbox.tenant_class)).queue

        return await self._await_host(choose)

    async def capacity(self, policy: TenantPolicy, image: str | None) -> HostCapacity | None:
        """Return the capacity of hosts for more sessions; None when no host could ever take one. Raises
        BrokerUnavailable.
        """
        return find_capacity(await self._reports(), HostRequirements(policy.sandbox.tenant_class, image), self._placed)

    async def _forget_quietly(self, tenant: str, session: str) -> None:
        # If Redis does not answer, the record expires by itself.
        with contextlib.suppress(BrokerUnavailable):
            await self.forget(tenant, session)

    def _cache_address(self, tenant: str, session: str, address: SessionAddress) -> SessionAddress:
        _add_bounded(self._addresses, (tenant, session), address)
        return address

    async def _await_host(self, choose: Callable[[], Awaitable[str]]) -> str:
        """Return the queue that `choose` returns. While no host serves that could take a session, and a host starts or
        does not report, try again. Raises NoHost.
        """
        until = time.monotonic() + SETTLE_S
        while True:
            is_late = time.monotonic() > until
            try:
                return await choose()
            except NoHost as refused:
                if is_late or refused.is_full or not (refused.is_coming or await self._has_silent_host()):
                    raise
            await asyncio.sleep(POLL_S)

    async def _has_silent_host(self) -> bool:
        return any(queue.startswith(HOST_QUEUES) for queue in await self._hosts.silent())

    async def _choose(self, policy: TenantPolicy, spec: SessionSpec, excluded: set[str]) -> str:
        reports = await self._reports()
        memory_bytes = max(spec.memory_bytes or 0, LOW_MEMORY_BYTES)
        needs = HostRequirements(policy.sandbox.tenant_class, spec.image, memory_bytes)
        queue = choose_host(reports, needs, placed=self._placed, excluded=excluded).queue
        # Counted before the claim, without an await in between. Otherwise a burst of openings would choose one host.
        self._placed[queue] += 1
        return queue

    async def _reports(self) -> list[HostReport]:
        """Return the reports of all hosts. `_placed` counts the sessions that were placed after each report."""
        reports = await self._hosts.reports()
        for report in reports:
            # The report counts the sessions that were placed before it.
            if report.reported_at > self._reported_at.get(report.queue, 0.0):
                del self._placed[report.queue]
        self._reported_at = {report.queue: report.reported_at for report in reports}
        for queue in self._placed.keys() - self._reported_at.keys():
            # The queue belongs to one start of a worker. A worker that no longer reports never returns with the same
            # queue, so its count is not needed.
            del self._placed[queue]
        return reports

    async def _count_claim(self, queue: str, claim: Awaitable[_Claimed]) -> _Claimed:
        """Count the session for that host while `claim` writes the location, and return the result of `claim`. If the
        claim is refused, the session is no longer counted: repeated refusals would make the host appear full.
        """
        claimed = None
        try:
            claimed = await claim
            return claimed
        finally:
            if claimed is None and self._placed[queue]:
                self._placed[queue] -= 1

    async def _send_to_hosts(
        self, opening: OpenRequest, address: SessionAddress, policy: TenantPolicy, excluded: set[str]
    ) -> tuple[ToolResult, SessionAddress]:
        """Send the call `session.open`. Try other hosts when a host is lost before it answers, or has no capacity.
        Return the result and the address of the host that gave it.

        A failed opening releases the location, so that the next caller may try again.
        """
        tenant, session = opening.tenant, opening.session
        try:
            while True:
                try:
                    result = await self._send_open(opening, address)
                except (NotSent, CallLost) as lost:
                    address = await self._claim_other_host(opening, address, policy, excluded, str(lost))
                    continue
                if result.error_code is ErrorCode.SANDBOX_UNAVAILABLE:
                    # The host is fuller than its report said, or its engine fails. Other hosts may have capacity.
                    try:
                        address = await self._claim_other_host(opening, address, policy, excluded, str(result.error))
                    except SandboxUnavailable:
                        await self._release(tenant, session, address.fence)
                        return result, address
                    continue
                if result.success:
                    # During a move, the location says `moving` until here, and other callers wait. If this process dies
                    # before this line, `moving_until` ends the wait, and the next caller moves the session again.
                    await self._sessions.settle(
                        tenant, session, address.fence, LocationState.OPEN, json.dumps(result.metadata)
                    )
                    self._cache_address(tenant, session, address)
                else:
                    await self._release(tenant, session, address.fence)
                return result, address
        except BaseException:
            # The host may open the session anyway. The next claim has a higher fence, and the host then closes its
            # copy.
            await asyncio.shield(self._release(tenant, session, address.fence))
            raise

    async def _claim_other_host(
        self, opening: OpenRequest, address: SessionAddress, policy: TenantPolicy, excluded: set[str], reason: str
    ) -> SessionAddress:
        """Claim another host for an opening whose host was lost or refused it."""
        excluded.add(address.queue)
        if (adopted_address := await self._find_adopted(opening, address)) is not None:
            return adopted_address
        log.warning("session_opens_elsewhere", session=opening.session, queue=address.queue, reason=reason)
        if len(excluded) > MAX_HOSTS:
            raise SandboxUnavailable(
                f"{MAX_HOSTS} hosts in a row were lost or refused the session while it was opened; see `toolcrew "
                "hosts list`"
            )
        queue = await self._choose(policy, opening.spec, excluded)
        # A move is claimed only from the state `moving` without a holder, so this process gives up its own claim first.
        await self._release(opening.tenant, opening.session, address.fence)
        claimed = await self._count_claim(
            queue,
            self._sessions.begin_move(opening.tenant, opening.session, address.fence, LocationState.MOVING, queue),
        )
        if claimed is None:
            raise SandboxUnavailable(
                "another process closed or opened the session while this process opened it: try again"
            )
        return claimed

    async def _find_adopted(self, opening: OpenRequest, address: SessionAddress) -> SessionAddress | None:
        """Return the new address of a session that was being opened, if the next worker of the host has taken the
        session over. Sending `session.open` there again returns the existing session, so that the session does not stay
        without a caller.
        """
        location = await self._sessions.find(opening.tenant, opening.session) if opening.moved is None else None
        is_taken_over = location is not None and location.state is LocationState.OPEN and location.fence > address.fence
        return SessionAddress(location.queue, location.fence) if location is not None and is_taken_over else None

    async def _move(
        self, tenant: str, session: str, location: SessionLocation, policy: TenantPolicy
    ) -> SessionAddress | None:
        """Open the session on another host. Return None if its location changed or another process moves it; the
        caller then reads the location again.
        """
        spec = open_start(self._keys, tenant, session, location)
        excluded = {location.queue} if location.state is LocationState.OPEN else set[str]()
        queue = await self._choose(policy, spec, excluded)
        address = await self._count_claim(
            queue, self._sessions.begin_move(tenant, session, location.fence, location.state, queue)
        )
        if address is None:
            return None
        # Read the location again: the former host may have stored a newer checkpoint before the session was taken from
        # it.
        latest = await self._sessions.find(tenant, session) or location
        result = ToolResult.failed(ToolCall(id="none", name="session.open"), ErrorCode.INTERNAL, "not tried")
        # The owner may have deleted the last checkpoint. Without a checkpoint, nothing is restored, and the session's
        # next call reports that.
        checkpoints = [
            open_checkpoint(self._keys, tenant, session, sealed) for sealed in (latest.checkpoint, latest.automatic)
        ]
        for checkpoint in [*dict.fromkeys(filter(None, checkpoints)), ""]:
            # The time of an older automatic checkpoint is not stored.
            at = latest.checkpoint_at if checkpoint and checkpoint == checkpoints[0] else None
            spec = spec.model_copy(update={"restore": checkpoint or None})
            moved = _describe_move(location, at, address)
            log.warning(
                "session_moving",
                session=session,
                lost=location.queue,
                queue=address.queue,
                checkpoint=checkpoint or None,
            )
            # Use the address of the host that answered: it may be another host than the first one, and the location
            # then names that host.
            result, address = await self._send_to_hosts(
                OpenRequest(tenant, session, spec, moved), address, policy, excluded
            )
            if result.success:
                return address
            if result.error_code is not ErrorCode.FILE_NOT_FOUND:
                break
        raise SandboxUnavailable(
            f"the session's host is lost, and the session could not be opened on another host: {result.error}"
        )

    async def _release(self, tenant: str, session: str, fence: int) -> None:
        with contextlib.suppress(BrokerUnavailable):
            await self._sessions.settle(tenant, session, fence, LocationState.MOVING)


def _add_bounded(entries: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Add an entry. The oldest entries are removed, so that at most MAX_CACHED remain."""
    while len(entries) >= MAX_CACHED:
        entries.pop(next(iter(entries)))
    entries[key] = value


def _describe_move(before: SessionLocation, checkpoint_at: float | None, address: SessionAddress) -> SessionMove:
    """Return the move that the first result from the session's new sandbox reports."""
    at = None if checkpoint_at is None else datetime.fromtimestamp(checkpoint_at, UTC)
    return SessionMove(generation=address.fence, checkpoint_at=at, is_planned=not before.queue)


def no_such_session() -> ToolFailure:
    """Return the failure for a missing session. It is the same for a session that is closed, has expired, never
    existed, or belongs to another tenant.
    """
    return ToolFailure(
        ErrorCode.SESSION_NOT_FOUND,
        "there is no such session: this tenant has no open session of that name. It may have been closed or have "
        "expired; open a new one",
    )


def new_session_name() -> str:
    """Return a random session name. The name cannot be guessed, and does not begin with `-`, which a command would read
    as an option.
    """
    return secrets.token_hex(2) + secrets.token_urlsafe(15)
