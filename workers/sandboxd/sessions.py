"""The sessions of this host: open, prepare for a call, rebuild after a loss, evict, close.

Invariant: a session has at most one container, and a model never finds an empty workspace without an error that reports
the loss. Eviction, rebuild and close change the container and hold the session's lock meanwhile. A call that finds no
ready sandbox waits for the lock. A loss of files stays recorded until one call has reported it.

A session in memory has a record on disk, from which the next sandboxd takes over the session, even after kill -9. The
record is written before anything depends on it, and deleted after the container and the workspace were removed.
"""

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Set
from dataclasses import dataclass, replace
from typing import Any

import structlog

from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.session_spec import SessionMove
from toolcrew.contract.tenancy import SandboxPolicy
from toolcrew.workers.sandboxd.background import settle
from toolcrew.workers.sandboxd.budgets import FairBudget
from toolcrew.workers.sandboxd.disks.base import Workspace, WorkspaceSize
from toolcrew.workers.sandboxd.egress.secrets import AUTHORITY_VARIABLES
from toolcrew.workers.sandboxd.evictions import Evictions
from toolcrew.workers.sandboxd.factory import SandboxdEnding, SandboxFactory
from toolcrew.workers.sandboxd.images import ImageNotReady, ImageRefused
from toolcrew.workers.sandboxd.metering import UsageTotals
from toolcrew.workers.sandboxd.plans import SandboxPlan
from toolcrew.workers.sandboxd.pool import WarmPools
from toolcrew.workers.sandboxd.records import Records
from toolcrew.workers.sandboxd.sandbox import Sandbox
from toolcrew.workers.sandboxd.session import FILES_KEPT, FILES_LOST, HostSession, build_move_loss, build_move_news
from toolcrew.workers.sandboxd.suspension import MIN_IDLE_S, SessionSuspender, SuspensionStore, adopt

log = structlog.get_logger(__name__)

MAX_ROWS = 300
"""Maximum number of rows in an answer. A frame has space for this number of rows with any content."""
_STARTS_S = 5.0
"""Time that the shutdown of sandboxd waits for sandboxes that are starting, in seconds. Starts that take longer are
undone.
"""
_PACKED_AT_ONCE = 16
_ENDED_S = 60.0
"""Time for which the usage of an ended session is reported, in seconds. Workers read it more often."""
_MAX_ENDED = 5000
OPEN_WAIT_S = 45.0
"""Time that the opening of a session waits for the pull of its image, in seconds. The worker waits longer."""
_OTHER_IMAGE = (
    "the version of image {} that this session started with was removed; the new sandbox uses the current version"
)
Fill = Callable[[HostSession, Sandbox], Awaitable[None]]
"""Function that fills the sandbox of a new session."""
Revise = Callable[[SandboxPolicy, SandboxPlan], SandboxPlan]
"""Function that returns the current plan for a tenant's policy and an earlier plan. Raises ToolFailure when no plan
is allowed.
"""


@dataclass(frozen=True)
class SessionParameters:
    """Parameters of a new session. `fill`: function that fills the sandbox; None for an empty workspace. `moved`: set
    if another host had the session; `fill` then restores its checkpoint. `image_wait_s`: how long to wait for the pull
    of the image.
    """

    plan: SandboxPlan
    ttl_s: float
    fill: Fill | None = None
    policy: SandboxPolicy | None = None
    moved: SessionMove | None = None
    image_wait_s: float = OPEN_WAIT_S


class Sessions:
    """All sessions of this host. A sandbox serves one session and is never given to another."""

    def __init__(
        self,
        factory: SandboxFactory,
        pools: WarmPools,
        suspension_store: SuspensionStore,
        records: Records,
        *,
        limit: int,
        revise: Revise,
        prepare_network: Callable[[HostSession, Sandbox], Awaitable[None]] | None = None,
    ) -> None:
        """Create the collection. `prepare_network`: connects a session's new sandbox to the egress proxy."""
        self._factory = factory
        self._revise = revise
        self._prepare_network = prepare_network
        self._pools = pools
        self._records = records
        self.store = suspension_store
        self.suspender = SessionSuspender(factory, suspension_store, records)
        self._limit = limit
        self._sessions: dict[str, HostSession] = {}
        self._starting: dict[str, asyncio.Task[HostSession]] = {}
        self._ended: deque[tuple[float, str, UsageTotals]] = deque(maxlen=_MAX_ENDED)
        """(end time, name, totals) of sessions that ended recently."""
        self._evictions = Evictions(self.suspender.give_up)
        factory.slots.free_slot = self._free_slot

    async def open(self, session: str, start: SessionParameters) -> HostSession:
        """Open a session with a new, filled sandbox. An open session is returned unchanged, because the request may be
        a repetition. If the session had moved to another host and comes back, its old state on this host is closed
        first.

        Raises SandboxUnavailable when the host is full or the engine refuses. Also raises the errors of `fill`. After
        an error nothing of the session remains.
        """
        # Repeat, because another request may open the session again while its old state is being closed.
        while True:
            entry = await self._open_or_join(session, start)
            if start.moved is None or entry.fence >= start.moved.generation:
                if start.policy is not None:
                    self.update_policy(entry, start.policy)
                return entry
            log.warning("stale_session_closed", fence=entry.fence, wanted=start.moved.generation)
            await self.close(session)

    async def _open_or_join(self, session: str, start: SessionParameters) -> HostSession:
        entry = self._sessions.get(session)
        if entry is not None and entry.is_closing:
            await self.close(session)
            entry = self._sessions.get(session)
        if entry is not None:
            # Opening counts as a use, so that the session does not expire before its first call.
            entry.used_at = time.monotonic()
            return entry
        if session not in self._starting:
            self.check_room()
            # Start in a separate task: a worker that disconnects meanwhile must not leave an unregistered container.
            starting = asyncio.get_running_loop().create_task(self._open(session, start))
            # There is no await between the look-up and this line: two requests for one session must not start two
            # containers.
            self._starting[session] = starting
            starting.add_done_callback(lambda task: self._forget_start(session, task))
        return await asyncio.shield(self._starting[session])

    async def use(
        self, session: str, call_id: str | None = None, policy: SandboxPolicy | None = None, limit_s: float = 0.0
    ) -> tuple[HostSession, Sandbox]:
        """Return the session and its running sandbox, ready for the call `call_id`. `call_id` None: the request is not
        a call, so its result does not report a loss.

        `policy`: the tenant's current policy; None keeps the earlier policy. `limit_s`: the limit of the call. Raises
        ToolFailure (SESSION_NOT_FOUND, CANCELLED, INVALID_ARGUMENTS for a limit that the class does not allow) and
        SandboxUnavailable. After a loss of files, one call fails with the loss, and the next call gets a new, empty
        sandbox.
        """
        entry = self.find_open(session)
        entry.used_at = time.monotonic()
        if policy is not None:
            self.update_policy(entry, policy)
        if limit_s > entry.plan.timeout_s:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"a call in this session of class '{entry.policy.tenant_class}' may run {entry.plan.timeout_s:g} s at "
                f"most, not {limit_s:g} s: ask for less, or ask the operator to raise `timeout_s` in `largest` of the "
                "class",
            )
        if entry.is_ready and entry.sandbox is not None and entry.sandbox.remaining_s() < limit_s:
            # The sandbox would reach its maximum life during the call, so replace it. A busy session keeps its sandbox;
            # a call that is then cut off reports the loss.
            await self.suspender.give_up(entry, must_be_idle=False)
        if not entry.is_ready or entry.unreported_loss is not None:
            await self._wait_ready(entry, call_id)
        # The caller registers its call before its next await. The session is then busy and is not evicted.
        assert entry.sandbox is not None
        return entry, entry.sandbox

    def update_policy(self, entry: HostSession, policy: SandboxPolicy) -> None:
        """Set the tenant's policy. The network rules apply to the next connection, all other rules to the next
        sandbox.

        Open connections are cut if the new policy may forbid them.
        """
        if policy == entry.policy:
            return
        was, entry.policy = entry.policy, policy
        connections = entry.sandbox.tunnels if entry.sandbox is not None else None
        # Rules are checked only when a connection opens, so an open connection would keep the old rules.
        if connections is not None and _name_network(was) != _name_network(policy):
            connections.cut()
        self.suspender.try_keep(entry)

    def cut_users(self, secrets: Set[tuple[str, str]]) -> None:
        """Cut the connections of sessions that use one of these secrets (pairs of tenant and name). New connections get
        the present values.
        """
        for entry in self._sessions.values():
            connections = entry.sandbox.tunnels if entry.sandbox is not None else None
            if connections is not None and any((entry.tenant, name) in secrets for name, _ in entry.plan.secrets):
                connections.cut()

    def find(self, session: str) -> HostSession | None:
        """Return the session; None if it is unknown."""
        return self._sessions.get(session)

    def find_open(self, session: str) -> HostSession:
        """Return the session. Raises ToolFailure (SESSION_NOT_FOUND) and SandboxUnavailable."""
        entry = self._sessions.get(session)
        if entry is None or entry.is_closing:
            raise _build_not_found()
        if self._factory.is_ending:
            raise SandboxdEnding
        return entry

    def add_all(self, entries: Iterable[HostSession]) -> None:
        """Add new sessions without sandboxes, and record them. Raises SandboxUnavailable; then none of them remains."""
        entries = list(entries)
        self._sessions |= {entry.id: entry for entry in entries}
        try:
            for entry in entries:
                self.suspender.keep(entry)
        except SandboxUnavailable:
            for entry in entries:
                self._records.forget_session(entry.id)
                del self._sessions[entry.id]
            raise

    def set_ttl(self, session: str, ttl_s: float) -> None:
        """Let the session live for `ttl_s` seconds without a call from now on. Raises ToolFailure (SESSION_NOT_FOUND),
        SandboxUnavailable.
        """
        entry = self._sessions.get(session)
        if entry is None or entry.is_closing:
            raise _build_not_found()
        before = entry.ttl_s
        entry.ttl_s, entry.used_at = ttl_s, time.monotonic()
        try:
            self.suspender.keep(entry)
        except SandboxUnavailable:
            entry.ttl_s = before
            raise

    def all(self) -> list[HostSession]:
        return list(self._sessions.values())

    async def close(self, session: str, *, fence: int | None = None, cancels_calls: bool = False) -> bool:
        """Remove the session's sandbox and files, and return after the container is removed. Return False if there is
        no such session, or if `fence` is given and is not the number of its opening. `cancels_calls`: running calls end
        with CANCELLED and do not report a lost sandbox.

        Raises SandboxUnavailable when the engine refuses. The session is then unusable, and a periodic duty retries the
        removal.
        """
        if session in self._starting:
            # Do not stop a running start half-way: wait for it, and then close the session.
            await asyncio.wait({self._starting[session]})
        entry = self._sessions.get(session)
        if entry is None or fence not in (None, entry.fence):
            return False
        # Set this before waiting for the lock, which a rebuild may hold for long: calls that wait for the rebuild must
        # not begin afterwards.
        entry.is_closing = True
        async with entry.lock:
            # Another close may have removed the session while this one waited for the lock.
            if self._sessions.get(session) is entry:
                # Remove the container first, because it holds the workspace, and then the record: after kill -9 or a
                # refusal of the engine, the record leads to both. Archives and layers that forks share are deleted
                # last, because first no session may refer to them.
                if entry.sandbox is not None:
                    if cancels_calls:
                        entry.sandbox.end_calls("CANCELLED", "the session was closed during the call")
                    await entry.sandbox.remove()
                await self._factory.discard_workspace(entry.workspace)
                self._records.forget_session(session)
                del self._sessions[session]
                await self.forget_archive(entry, entry.archive)
                await self.discard_layers(entry.workspace.layers, entry.workspace.size)
                self._keep_totals(entry)
        return True

    async def close_all(self) -> None:
        """Remove the sandboxes and files of all sessions, including those that are starting. From now on no sandbox
        starts.
        """
        self._factory.is_ending = True
        await self._end_starts()
        await settle(self.close(session) for session in list(self._sessions))

    async def suspend_all(self, within_s: float) -> None:
        """Evict every container and keep the sessions for the next sandboxd. A container that cannot be packed in
        time loses its own state.

        From now on no call begins and no sandbox starts.
        """
        self._factory.is_ending = True
        await self._end_starts()
        # Limit the time: the service manager sends SIGKILL after a while. It is better to remove a container in order
        # without its own state.
        try:
            async with asyncio.timeout(within_s):
                await settle(entry.handed_over() for entry in self.all())
                places = FairBudget(_PACKED_AT_ONCE)
                await settle(self._suspend(entry, places) for entry in self.all())
        except TimeoutError:
            log.warning("sessions_not_packed_in_time", within_s=within_s)
        unpacked = [entry for entry in self.all() if entry.sandbox is not None]
        await settle(self._remove_unpacked(entry) for entry in unpacked)
        await settle(self.close(entry.id) for entry in self.all() if not self.suspender.is_kept(entry))

    def adopt(self) -> int:
        """Take over the sessions that an earlier sandboxd of this name kept. Return their number. Their containers no
        longer exist.
        """
        self._sessions |= {entry.id: entry for entry in adopt(self._records, self._factory.workspaces)}
        return len(self._sessions)

    async def sweep(self) -> None:
        """Delete workspaces and archives that no session's record names. Call this before the first session is opened.
        The next start retries a failed deletion.
        """
        records = self._records.sessions()
        archives = {(record.id.partition(":")[0], record.archive) for record in records if record.archive is not None}
        await settle(
            [
                self._factory.workspaces.sweep(
                    {name for record in records for name in (record.workspace, *record.layers)}
                ),
                self.store.forget_all_but(archives),
            ]
        )

    def describe(self, after: str = "") -> list[dict[str, Any]]:
        """Return one row per session, sorted by name, for names greater than `after`. Rows have no tenant content. At
        most MAX_ROWS rows fit into an answer.
        """
        # Use a name as the cursor and not a position, because sessions are opened and closed between two pages.
        names = heapq.nsmallest(MAX_ROWS, (name for name in self._sessions if name > after))
        return [self._sessions[name].describe() for name in names]

    def describe_usage(self, after: str = "") -> list[dict[str, Any]]:
        """Return the totals of at most MAX_ROWS sessions as `describe` does, also of sessions that have just ended.
        Names end with the meter, because an ended session may be open again.
        """
        usages = {f"{name}:{entry.usage.meter}": entry.describe_usage for name, entry in self._sessions.items()}
        usages |= {f"{name}:{usage.meter}": usage.describe for _, name, usage in self._ended}
        names = heapq.nsmallest(MAX_ROWS, (name for name in usages if name > after))
        return [{"name": name, **usages[name]()} for name in names]

    def count_sandboxes(self) -> int:
        """Return the number of containers of the sessions."""
        return sum(entry.sandbox is not None for entry in self._sessions.values())

    def __len__(self) -> int:
        return len(self._sessions)

    def _keep_totals(self, entry: HostSession) -> None:
        """Keep the totals of an ended session until every worker has certainly read them."""
        now = time.monotonic()
        self._ended.append((now, entry.id, entry.usage))
        while self._ended[0][0] < now - _ENDED_S:
            self._ended.popleft()

    def check_room(self, more: int = 1) -> None:
        """Raise SandboxUnavailable when this host cannot take more sessions."""
        if len(self._sessions) + len(self._starting) + more > self._limit:
            raise SandboxUnavailable(
                f"this host already has {self._limit} sessions: close some, add a host, or raise TOOLCREW_MAX_SESSIONS"
            )

    async def _open(self, session: str, start: SessionParameters) -> HostSession:
        warm = await self._pools.take(start.plan)
        if warm is not None:
            plan, workspace, sandbox = replace(start.plan, image_id=warm.image_id), warm.workspace, warm.sandbox
        else:
            plan, workspace, sandbox = await self._make_pinned(session, start)
        entry = HostSession(session, plan, start.ttl_s, workspace, sandbox, policy=start.policy or SandboxPolicy())
        if start.moved is not None:
            _move_in(entry, sandbox, start.moved, is_restored=start.fill is not None)
        try:
            await self._connect(entry, sandbox)
            if start.fill is not None:
                await start.fill(entry, sandbox)
                entry.used_at = time.monotonic()
            # Write the record before the session becomes visible, so that a session that a worker knows survives the
            # death of sandboxd.
            self.suspender.keep(entry)
        except BaseException:
            # The discard is shielded: a second cancellation must not leave the container behind.
            await asyncio.shield(settle([self._factory.discard(sandbox, entry.workspace)]))
            raise
        self._sessions[session] = entry
        return entry

    async def _connect(self, entry: HostSession, sandbox: Sandbox) -> None:
        """Let a new sandbox belong to the session: count its usage for it, connect it to the network, and give its
        programs the placeholders of the session's secrets.
        """
        sandbox.tenant = entry.tenant
        sandbox.meter.bill(entry.usage)
        if self._prepare_network is not None:
            await self._prepare_network(entry, sandbox)
        if entry.plan.secrets:
            await sandbox.set_variables({**dict(entry.plan.secrets), **AUTHORITY_VARIABLES})

    async def _make_pinned(self, session: str, start: SessionParameters) -> tuple[SandboxPlan, Workspace, Sandbox]:
        """Start a sandbox. Its image gets a content id, and is pulled first if needed; the pull needs no slot."""
        try:
            async with self._factory.pinned(start.plan, start.image_wait_s, session.partition(":")[0]) as pinned:
                return pinned, *await self._make_cold(pinned)
        # With these error codes the orchestrator does not try other hosts, each of which would pull the image too.
        except ImageRefused as refused:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, str(refused)) from refused
        except ImageNotReady as not_ready:
            raise ToolFailure(ErrorCode.TIMEOUT, str(not_ready)) from not_ready

    async def _make_cold(self, plan: SandboxPlan) -> tuple[Workspace, Sandbox]:
        await self._factory.slots.take()
        try:
            workspace = await self._factory.make_workspace(plan)
        except BaseException:
            # Return the slot here: without a container, the factory does not return it.
            self._factory.slots.give_back()
            raise
        try:
            return workspace, await self._factory.make(plan, workspace, 1)
        except BaseException:
            await asyncio.shield(self._factory.discard_workspace(workspace))
            raise

    def _forget_start(self, session: str, task: "asyncio.Task[HostSession]") -> None:
        del self._starting[session]
        if not task.cancelled():
            task.exception()  # retrieve the exception: the caller may have left

    async def _end_starts(self) -> None:
        if not self._starting:
            return
        _, late = await asyncio.wait(self._starting.values(), timeout=_STARTS_S)
        for start in late:
            start.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _wait_ready(self, entry: HostSession, call_id: str | None) -> None:
        """Wait until the sandbox is ready. A cancel request removes the id of a waiting call from `entry.waiting`."""
        # Until the call is in the guest, a cancel finds it only in this list.
        if call_id is not None:
            entry.waiting.append(call_id)
        try:
            async with entry.lock:
                if entry.is_closing:
                    raise _build_not_found()
                await self.make_ready(entry, is_call=call_id is not None)
        finally:
            is_cancelled = call_id is not None and call_id not in entry.waiting
            if call_id is not None and not is_cancelled:
                entry.waiting.remove(call_id)
        if is_cancelled:
            raise ToolFailure(ErrorCode.CANCELLED, "the call was cancelled before it began")
        entry.used_at = time.monotonic()

    async def make_ready(self, entry: HostSession, *, is_call: bool = False) -> None:
        """Give a session, whose lock the caller holds, a running sandbox. Raises SandboxUnavailable."""
        sandbox = entry.sandbox
        lost = sandbox if sandbox is not None and sandbox.lost is not None else None
        # If a call was running when the sandbox died, its own result has reported the loss.
        if lost is not None and not entry.workspace.outlives_container and not lost.is_loss_reported:
            lost.is_loss_reported = True
            entry.unreported_loss = FILES_LOST.format(f"the sandbox of this session died ({lost.lost})")
        self.refuse_lost(entry, is_call=is_call)
        if lost is not None:
            await self._remove_lost(entry, lost)
        if entry.sandbox is None:
            await self._start_again(entry)
        elif entry.is_paused:
            await entry.sandbox.unpause()
            entry.is_paused = False

    def refuse_lost(self, entry: HostSession, *, is_call: bool = False) -> None:
        """Raise SandboxUnavailable with an unreported loss of files. The first call reports the loss and clears it;
        until then, all other requests are refused. So a model never finds an empty folder without notice.
        """
        if entry.unreported_loss is not None:
            unreported_loss = entry.unreported_loss
            if is_call:
                # Clear the loss before the answer is sent: sandboxd cannot know whether a model reads it. Save the
                # record, so that a restart does not report the loss again.
                entry.unreported_loss = None
                self.suspender.try_keep(entry)
            raise SandboxUnavailable(unreported_loss)

    async def _remove_lost(self, entry: HostSession, sandbox: Sandbox) -> None:
        await sandbox.remove()
        # The result of a running call has already reported the loss.
        entry.lost = sandbox.lost
        is_news = entry.workspace.outlives_container and not sandbox.is_loss_reported
        if is_news:
            entry.add_news(FILES_KEPT.format(sandbox.lost))
        entry.sandbox, entry.is_paused = None, False

    async def _start_again(self, entry: HostSession) -> None:
        """Start a new container around the session's workspace, with the packed state of the last container."""
        # After a fork, the state of the old container may still be being packed. A container that starts before its end
        # would lack this state.
        await entry.handed_over()
        async with self._factory.pinned(self._plan_again(entry), tenant=entry.tenant) as plan:
            await self._factory.slots.take()
            sandbox = await self._factory.make(plan, entry.workspace, entry.generation + 1)
        if plan.image == entry.plan.image and entry.plan.image_id not in (None, plan.image_id):
            entry.add_news(_OTHER_IMAGE.format(plan.image))
        entry.plan = plan
        try:
            await self._connect(entry, sandbox)
            if entry.lost is None and entry.archive is not None:
                await self.suspender.unpack(entry, sandbox)
            if self._factory.is_ending:
                raise SandboxdEnding  # the archive is kept for the next attempt
        except BaseException:
            await asyncio.shield(settle([self._factory.discard(sandbox)]))
            raise
        entry.was_rebuilt = entry.was_rebuilt or entry.lost is not None
        archive, entry.archive, entry.is_unfilled = entry.archive, None, False
        entry.sandbox, entry.generation, entry.lost, entry.checked_at = sandbox, entry.generation + 1, None, 0.0
        entry.activity.end_jobs()
        self.suspender.try_keep(entry)  # Save before the deletion: a record must not name a deleted archive.
        await self.forget_archive(entry, archive)

    async def forget_archive(self, entry: HostSession, archive: str | None) -> None:
        """Delete an archive that a session no longer needs, unless a fork still needs it."""
        # Forks share the archive of their parent. If no session has the archive now, no later fork can share it.
        if all(other.archive != archive for other in self._sessions.values()):
            await self.suspender.forget_archive(entry, archive)

    async def discard_layers(self, layers: tuple[str, ...], size: WorkspaceSize) -> None:
        """Delete those of these frozen workspaces that no session has as a layer."""
        if not layers:
            return
        used = {layer for entry in self._sessions.values() for layer in entry.workspace.layers}
        for layer in layers:
            found = self._factory.workspaces.find(layer, size) if layer not in used else None
            if found is not None:
                await self._factory.discard_workspace(found)

    def _plan_again(self, entry: HostSession) -> SandboxPlan:
        """Return the plan of the session's next sandbox. Raises SandboxUnavailable when the class or the
        policy allows none.
        """
        try:
            plan = self._revise(entry.policy, entry.plan)
        except ToolFailure as refused:
            raise SandboxUnavailable(
                f"the session cannot get another sandbox ({refused}): open a new session"
            ) from refused
        if plan.image != entry.plan.image:
            log.warning("session_image_not_allowed_any_more", was=entry.plan.image, now=plan.image)
        return plan

    async def _suspend(self, entry: HostSession, places: FairBudget) -> None:
        async with places.hold(entry.tenant, 1):
            await self.suspender.suspend(entry)

    async def _remove_unpacked(self, entry: HostSession) -> None:
        """Remove a container that could not be packed. Its own state is lost."""
        try:
            self.suspender.keep(entry)
        finally:
            if entry.sandbox is not None:
                await entry.sandbox.remove()

    async def _free_slot(self) -> bool:
        """Free a slot for another session: remove a warm sandbox, or evict the session that was idle for the longest
        time. Returns whether a slot is free.
        """
        if await self._pools.give_up_one():
            return True
        return await self._evictions.free_slot(self._find_idle, lambda: not self._factory.slots.is_full)

    def _find_idle(self) -> list[HostSession]:
        # Skip a session whose `checked_at` is recent, because it had a job or could not be packed. Otherwise every
        # waiting caller would try it again.
        checked_before = time.monotonic() - MIN_IDLE_S
        return [
            entry
            for entry in self.all()
            if entry.may_evict and entry.idle_s() >= MIN_IDLE_S and entry.checked_at < checked_before
        ]


def _name_network(policy: SandboxPolicy) -> tuple[object, ...]:
    return (policy.network, policy.tenant_class, policy.secrets)


def _move_in(entry: HostSession, sandbox: Sandbox, moved: SessionMove, *, is_restored: bool) -> None:
    """Mark a session that comes from another host. Its first call reports the loss."""
    entry.fence = entry.generation = sandbox.generation = moved.generation
    entry.was_rebuilt = True
    if is_restored:
        entry.automatic_at = moved.checkpoint_at.timestamp() if moved.checkpoint_at is not None else 0.0
        entry.news = build_move_news(moved)
    else:
        entry.unreported_loss = build_move_loss(moved)


def _build_not_found() -> ToolFailure:
    return ToolFailure(
        ErrorCode.SESSION_NOT_FOUND,
        "no such session on this host: it was closed, expired, or its host was restarted; open a new one",
    )
