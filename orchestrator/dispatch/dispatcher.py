"""ToolCall -> ToolResult: the only door to the workers. May it run, where, until when; and always a result."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pydantic import JsonValue, ValidationError

from contract.calls import DEFAULT_TIMEOUT_S, ToolCall, ToolContext, ToolResult
from contract.clock import SharedClock
from contract.errors import BrokerUnavailable, ConfigError, ErrorCode, OperatorError, ToolFailure
from contract.names import POOL_QUEUES
from contract.policy_checks import check_switches
from contract.registry import find_switch
from contract.schema import prepare_arguments
from contract.session_locations import SessionLocation
from contract.signing import SigningKeys
from contract.specs import ToolSpec
from contract.tenancy import SKILL_TOOL
from orchestrator.admission import Admission, Unlimited
from orchestrator.dispatch.call_events import CallEventListener, Handler
from orchestrator.dispatch.call_kills import KillWatch
from orchestrator.dispatch.carrier import ArgumentStore, Carrier, Errand
from orchestrator.dispatch.placement import HostRoom
from orchestrator.dispatch.recovery import RESEND_S, CallBook, Recovery, repeated
from orchestrator.dispatch.session_locator import HostSource, Opening, SessionLocator
from orchestrator.dispatch.tenant_rules import policy_for, refuse_by_policy
from orchestrator.dispatch.tool_search import TenantTools, ToolSearch, as_skill_run
from orchestrator.dispatch.transport import CallLost, DeliveryFailed, Transport
from orchestrator.large_arguments import check_off_loop
from orchestrator.metrics.call_meter import CallMeter
from orchestrator.tracing import call_spans, current_call
from store.catalog import CatalogSource
from store.publisher import NotSent
from store.sessions import SessionAddress, SessionStore
from store.slots import Priority
from store.switches import SwitchSource
from store.tasks import Backoff
from store.tenants import OpenTenants, TenantSource
from telemetry.logs import bound, get_logger
from telemetry.spans import Tracer

log = get_logger(__name__)

OPEN_TIMEOUT_S = 60.0
PARCEL_TIMEOUT_S = 540.0
"""For keeping all of a session's files, or restoring them."""


@dataclass(frozen=True)
class Route:
    """For whom a call runs. `queue` None: where its session lives, or its tool's pool; else straight there, whoever
    reads it.
    """

    tenant: str
    session: str | None
    queue: str | None = None


@dataclass(frozen=True)
class Terms:
    """How a call is to be run. `timeout_s` None: the call's own `timeout` argument, else the tool's default."""

    timeout_s: float | None = None
    default_timeout_s: float = DEFAULT_TIMEOUT_S
    run: str | None = None
    model: str | None = None
    blob: str | None = None
    text_arguments: bool = False
    audience: Literal["model", "session"] = "model"
    priority: Priority = "interactive"
    """batch: after the tenant's interactive calls, when slots are few."""
    handlers: Mapping[str, Handler] = field(default_factory=dict)
    """By kind (contract/call_events.py): who is told what the call says while it runs."""
    config: Mapping[str, JsonValue] = field(default_factory=dict)
    """What tools find in their context's configuration."""
    keeps_result: bool = False
    """What Redis has of the result stays there until `Dispatcher.settle`, so that another process finds it when this
    one dies; and who stops waiting does not cancel the call."""
    sent_since: float | None = None
    """Unix seconds of the first moment at which another process may have sent the call: it is then awaited, not sent.
    None: it was never sent.
    """


@dataclass(frozen=True)
class Pool:
    """What is known of a pool of hosts: where sessions live, which hosts live, what became of calls."""

    sessions: SessionStore
    hosts: HostSource
    ledger: CallBook


class Dispatcher:
    """Checks, signs, sends, awaits. Never raises for a call's failure, whoever's it is.

    `pool` None: there are no hosts to choose from; calls go to their route's queue, and what is lost there is lost.
    """

    def __init__(
        self,
        transport: Transport,
        catalog: CatalogSource,
        keys: SigningKeys,
        *,
        queue_wait_s: float,
        events: CallEventListener | None = None,
        switches: SwitchSource | None = None,
        tenants: TenantSource | None = None,
        admission: Admission | None = None,
        pool: Pool | None = None,
        clock: SharedClock | None = None,
        tracer: Tracer | None = None,
        kills: KillWatch | None = None,
        meter: CallMeter | None = None,
        offers: TenantTools | None = None,
        blobs: ArgumentStore | None = None,
    ) -> None:
        self.keys = keys
        """What calls are signed with."""
        self._tracer = tracer
        self._kills = kills
        self._meter = meter
        self._search = ToolSearch(catalog, offers, meter)
        self._queue_wait_s = queue_wait_s
        self._listener = events.id if events is not None else None
        self._switches = switches
        self._tenants = tenants or OpenTenants()
        self._clock = clock or SharedClock()
        self._carrier = Carrier(
            transport, keys, admission or Unlimited(), self._clock, events, is_traced=tracer is not None, blobs=blobs
        )
        self._locator = SessionLocator(pool.sessions, pool.hosts, self._send_open, keys) if pool is not None else None
        self._recovery = (
            Recovery(self._carrier, self._locator, pool.ledger)
            if pool is not None and self._locator is not None
            else None
        )

    async def dispatch(self, call: ToolCall, route: Route, terms: Terms | None = None) -> ToolResult:
        """The one result of the call."""
        started, terms = time.monotonic(), terms or Terms()
        with bound(**_names(call, route, terms)):
            try:
                result = await self._traced(
                    call, route, self._answered(call, self._dispatch(call, route, terms)), terms.run
                )
            except asyncio.CancelledError:
                if self._meter is not None and not terms.keeps_result:
                    self._meter.count_abandoned(call.name)
                raise
            total_s = time.monotonic() - started
            log.info("call_done", code=result.error_code, total_s=round(total_s, 4))
        clocks = result.clocks
        known = clocks.queued_s + clocks.sandbox_s + clocks.run_s
        # A skill's call that was sent as skill_tool's is counted as that one's: its name is its tenant's own.
        result = self._counted(
            result.model_copy(update={"clocks": clocks.model_copy(update={"transfer_s": max(0.0, total_s - known)})})
        )
        return result.model_copy(update={"name": call.name})

    async def open_session(self, tenant: str, session: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Open a session on a host chosen for it. The result of `session.open`, whatever happened."""
        call = ToolCall(id=secrets.token_hex(16), name="session.open", arguments=dict(arguments))
        work = self._answered(call, self._open_session(tenant, session, arguments))
        return self._counted(await self._traced(call, Route(tenant, session), work))

    async def room(self, tenant: str, image: str | None) -> HostRoom | None:
        """What hosts have for more sessions of a tenant; None when none could take one. Raises ToolFailure,
        OperatorError.
        """
        return await self._in_pool().room(await self._tenants.policy(tenant), image)

    async def close_session(self, tenant: str, session: str) -> ToolResult:
        """Close a session where it lives, and forget it; one whose host is lost is closed as well. The result of
        `session.close`.
        """
        call = ToolCall(id=secrets.token_hex(16), name="session.close")
        work = self._answered(call, self._close_session(call, tenant, session))
        return self._counted(await self._traced(call, Route(tenant, session), work))

    async def abandon_session(self, tenant: str, session: str) -> None:
        """Have a session closed at once, past its host's queue, and forget it. Raises BrokerUnavailable."""
        locator = self._in_pool()
        if (address := await locator.last(tenant, session)) is not None:
            await self.command(
                ToolCall(id=secrets.token_hex(16), name="session.close"), Route(tenant, session, address.queue)
            )
        await locator.forget(tenant, session)

    async def session_location(self, tenant: str, session: str) -> SessionLocation:
        """Where an open session lives, whoever opened it. Raises ToolFailure(SESSION_NOT_FOUND), OperatorError."""
        return await self._in_pool().location(tenant, session)

    async def session_start(self, tenant: str, session: str) -> dict[str, Any]:
        """Return the arguments with which an open session was opened. Raises ToolFailure(SESSION_NOT_FOUND),
        OperatorError.
        """
        return await self._in_pool().start(tenant, session)

    async def session_facts(self, tenant: str, session: str) -> dict[str, Any] | None:
        """What its host told when it opened the session; None when that is not known (any more). Raises
        BrokerUnavailable.
        """
        return await self._in_pool().facts(tenant, session)

    def settle(self, tenant: str, call_id: str) -> None:
        """The result of a call that was made with `keeps_result` is safe elsewhere."""
        self._carrier.settle(tenant, call_id)

    def session_queue(self, tenant: str, session: str) -> str | None:
        """Where the last call of the session went."""
        address = self._locator.known(tenant, session) if self._locator is not None else None
        return address.queue if address is not None else None

    async def any_queue(self, tenant: str) -> str:
        """Of some host, for what any may do. Raises ToolFailure, OperatorError."""
        return await self._in_pool().any_queue(await self._tenants.policy(tenant))

    async def command(self, call: ToolCall, route: Route) -> None:
        """Tell the session's host, or a queue's workers, at once, past the queue: `session.cancel` or `session.close`.
        Nothing comes back.

        Raises BrokerUnavailable.
        """
        queue = route.queue
        if queue is None and self._locator is not None and route.session is not None:
            address = self._locator.known(route.tenant, route.session)
            queue = address.queue if address is not None else None
        if queue is None:
            return  # nobody is known to have it
        now = self._clock()
        context = ToolContext(
            tenant=route.tenant, session=route.session, sent_at=now, deadline_at=now + self._queue_wait_s
        )
        await self._carrier.command(queue, call, context)

    async def _traced(
        self, call: ToolCall, route: Route, work: Awaitable[ToolResult], run: str | None = None
    ) -> ToolResult:
        """What it gives; while tracing is on, with the call's spans around it."""
        if self._tracer is None:
            return await work
        with call_spans(self._tracer, call, route.tenant, route.session, run) as spans:
            result = await work
            spans.finish(result)
        return result

    def _counted(self, result: ToolResult) -> ToolResult:
        if self._meter is not None:
            self._meter.count(result)
        return result

    async def _answered(self, call: ToolCall, work: Awaitable[ToolResult]) -> ToolResult:
        """What it gives, or a result that says why it gives none."""
        try:
            return await work
        except ToolFailure as failure:
            return ToolResult.failed(call, failure.code, failure.message, metadata=dict(failure.metadata))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            return ToolResult.failed(call, ErrorCode.INVALID_ARGUMENTS, f"{call.name}: {where}: {first['msg']}")
        except (DeliveryFailed, OperatorError) as error:
            log.error("call_not_served", tool=call.name, call=call.id, code=error.code.value, error=str(error))
            return ToolResult.failed(call, error.code, str(error))

    async def _open_session(self, tenant: str, session: str, arguments: Mapping[str, Any]) -> ToolResult:
        return await self._in_pool().open(tenant, session, await self._tenants.policy(tenant), arguments)

    async def _close_session(self, call: ToolCall, tenant: str, session: str) -> ToolResult:
        locator, until = self._in_pool(), Backoff(RESEND_S)
        closed = ToolResult(call_id=call.id, name=call.name, success=True, metadata={"closed": False})
        address = locator.known(tenant, session) or await locator.find_for_closing(tenant, session)
        while address is not None:
            told = await self._closed_at(address, tenant, session)
            if told is not None:
                closed = told
                break
            # It has moved, or its host is just being restarted: left there it would hold its sandbox until its time is
            # up.
            address = await locator.find_for_closing(tenant, session) if await until.wait() else None
        await locator.forget(tenant, session)
        return closed

    async def _closed_at(self, address: SessionAddress, tenant: str, session: str) -> ToolResult | None:
        """What came of closing a session there; None when nobody there took the call."""
        # A call of its own each time: an earlier one may still be in the ledger.
        call = ToolCall(id=secrets.token_hex(16), name="session.close")
        errand = await self._errand(call, Route(tenant, session), _verb(OPEN_TIMEOUT_S))
        try:
            result = await self._once(errand, address)
        except (NotSent, CallLost) as lost:
            log.info("session_not_closed_there", session=session, queue=address.queue, reason=str(lost))
            return None
        failure = result.run_failure
        return None if failure is not None and failure.is_temporary else result

    async def _dispatch(self, call: ToolCall, route: Route, terms: Terms) -> ToolResult:
        errand = await self._errand(call, route, terms)
        pool = POOL_QUEUES.get(errand.spec.pool)
        try:
            carried = self._carried(errand, pool or route.queue)
            result = await (self._kills.watched(route.tenant, call.id, carried) if self._kills is not None else carried)
            return note_aliases(result, errand.aliases)
        except asyncio.CancelledError:
            if pool is not None and not terms.keeps_result:
                # The host of the session, whom the session tells, does not run it.
                await asyncio.shield(self._cancel(call, Route(route.tenant, route.session, pool)))
            raise

    async def _carried(self, errand: Errand, queue: str | None) -> ToolResult:
        if self._recovery is not None and (queue is None or not errand.is_sticky):
            return await self._recovery.carry(errand)
        if queue is None:
            raise ConfigError(f"{errand.call.name} runs where its session lives, and this program has no pool of hosts")
        try:
            return await self._carrier.carry(errand, queue)
        except NotSent:
            # Without an address that is the only reason.
            raise repeated() from None
        except CallLost as lost:
            code = ErrorCode.OUTCOME_UNKNOWN if lost.has_started else ErrorCode.HOST_LOST
            raise DeliveryFailed(code, lost.told) from None

    async def _errand(self, call: ToolCall, route: Route, terms: Terms) -> Errand:
        """Raises ToolFailure for a call that may not be made, whatever the reason; ConfigError, BrokerUnavailable."""
        policy = await policy_for(self._tenants, route.tenant, call.name)
        spec = await self._search.find(call.name, terms.audience, route.tenant)
        if self._tracer is not None and (spans := current_call()) is not None:
            spans.know(spec)
        await self._check_switch(spec, route.tenant)
        check = partial(prepare_arguments, spec, call.arguments, text=terms.text_arguments)
        arguments, aliases = await check_off_loop(spec, call.arguments, check, text=terms.text_arguments)
        await self._check_switch(spec, route.tenant, arguments)
        await refuse_by_policy(policy, route.tenant, spec, arguments)
        sent_at = self._clock()
        context = ToolContext(
            tenant=route.tenant,
            run=terms.run,
            session=route.session,
            sent_at=sent_at,
            deadline_at=sent_at + self._queue_wait_s,
            timeout_s=effective_limit(spec, arguments, terms),
            blob=terms.blob,
            model=terms.model,
            config=dict(terms.config),
            events=self._listener if terms.handlers else None,
        )
        sent, sent_spec = call.model_copy(update={"arguments": arguments}), spec
        if spec.is_installed_skill:
            sent_spec = await self._search.find(SKILL_TOOL, terms.audience, route.tenant)
            sent = as_skill_run(sent, sent_spec)
        return Errand(
            sent,
            context,
            sent_spec,
            policy,
            self._queue_wait_s,
            terms.priority,
            dict(terms.handlers),
            aliases,
            keeps_result=terms.keeps_result,
            sent_since=terms.sent_since,
            shown_as=spec.name if sent_spec is not spec else None,
        )

    async def _send_open(self, opening: Opening, address: SessionAddress) -> ToolResult:
        """One attempt at `session.open`, at that address."""
        call = ToolCall(id=secrets.token_hex(16), name="session.open", arguments=dict(opening.arguments))
        terms = _verb(PARCEL_TIMEOUT_S if "restore" in call.arguments else OPEN_TIMEOUT_S)
        return await self._once(await self._errand(call, Route(opening.tenant, opening.session), terms), address)

    async def _once(self, errand: Errand, address: SessionAddress) -> ToolResult:
        """The result of one attempt; whoever wants another makes another call."""
        result = await self._carrier.carry(errand, address)
        if self._recovery is not None:
            await self._recovery.note_end(errand, result)
        return result

    def _in_pool(self) -> SessionLocator:
        if self._locator is None:
            raise ConfigError("sessions need a pool of hosts, and this program has none")
        return self._locator

    async def _cancel(self, call: ToolCall, route: Route) -> None:
        """Best effort: when Redis is away the call runs into its own limit."""
        order = ToolCall(id=secrets.token_hex(16), name="session.cancel", arguments={"call_id": call.id})
        with contextlib.suppress(BrokerUnavailable):
            await self.command(order, route)

    async def _check_switch(self, spec: ToolSpec, tenant: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Raises ToolFailure for a tool that an administrator has turned off, BrokerUnavailable when that is not
        known.
        """
        if self._switches is not None and spec.audience == "model":
            switches = await self._switches.switches()
            check_switches(lambda name: find_switch(switches, name, tenant), spec, arguments)


def _names(call: ToolCall, route: Route, terms: Terms) -> dict[str, str]:
    """What is logged about the call carries."""
    told = {"tenant": route.tenant, "session": route.session, "run": terms.run, "call": call.id, "tool": call.name}
    return {name: value for name, value in told.items() if value}


def _verb(timeout_s: float) -> Terms:
    return Terms(timeout_s=timeout_s, audience="session")


def note_aliases(result: ToolResult, used: list[str]) -> ToolResult:
    """The result, telling by which other names its parameters were given (`given -> canonical`)."""
    return result.model_copy(update={"metadata": {**result.metadata, "aliases_used": list(used)}}) if used else result


def effective_limit(spec: ToolSpec, arguments: Mapping[str, Any], terms: Terms) -> float:
    """Seconds the call may run: what is asked for it, else the tool's default, never more than the tool's maximum."""
    asked = terms.timeout_s
    own = arguments.get("timeout")
    if asked is None and isinstance(own, int | float) and not isinstance(own, bool) and own > 0:
        asked = own
    if asked is None:
        asked = spec.timeout_s if spec.timeout_s is not None else terms.default_timeout_s
    return float(min(asked, spec.max_timeout_s))
