"""Dispatch calls: check each call, deliver it to a worker, and return its one result."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from pydantic import ValidationError

from toolcrew.concurrency.tasks import Backoff
from toolcrew.concurrency.tenant_threads import in_tenant_thread
from toolcrew.contract.calls import LONGEST_TIMEOUT_S, MAX_TIMEOUT_S, ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import ConfigError, ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.names import POOL_QUEUES
from toolcrew.contract.schema import is_quick, prepare_arguments
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.specs import ToolSpec
from toolcrew.contract.tenancy import SKILL_TOOL, TenantPolicy, largest_limit
from toolcrew.orchestrator.dispatch.delivery import RESEND_S, Delivery, Pool
from toolcrew.orchestrator.dispatch.placement import HostCapacity
from toolcrew.orchestrator.dispatch.request import CheckedRequest, Request
from toolcrew.orchestrator.dispatch.session_locator import OpenRequest, SessionLocator
from toolcrew.orchestrator.dispatch.tenant_catalog import CallRules, TenantCatalog, check_policy
from toolcrew.orchestrator.dispatch.transport import CallLost, DeliveryFailed, Transport, used_for_another_call
from toolcrew.store.call_messages import NotSent
from toolcrew.store.sessions import SessionAddress
from toolcrew.telemetry.logs import bound, get_logger

log = get_logger(__name__)

OPEN_TIMEOUT_S = 60.0
ARCHIVE_TIMEOUT_S = 540.0
"""Time limit, in seconds, for storing or restoring all files of a session."""

Work = Callable[[], Awaitable[ToolResult]]


class CallMiddleware(Protocol):
    """An optional feature around the calls of a dispatcher (orchestrator/dispatch/middleware.py)."""

    async def run(self, request: Request, work: Work) -> ToolResult:
        """Run `work`, which makes the call, and return its result. `work` does not raise for a failure of the call;
        it may be cancelled.
        """
        ...

    def tool_found(self, spec: ToolSpec) -> None:
        """Receive the tool of the call. The dispatcher calls this method within `run`."""
        ...

    def tools_changed(self, published: Sequence[ToolSpec]) -> None:
        """Receive the published tools. The dispatcher calls this method before the first call, and when the workers
        publish other tools.
        """
        ...


class Dispatcher:
    """Checks calls and delivers them. A failed call never raises an exception.

    `pool` None: there are no hosts to choose from. Calls go to the queue of their request, and a lost call is not
    sent again.
    """

    def __init__(
        self,
        transport: Transport,
        tools: TenantCatalog,
        keys: SigningKeys,
        *,
        queue_wait_s: float,
        rules: CallRules | None = None,
        pool: Pool | None = None,
        middleware: Sequence[CallMiddleware] = (),
    ) -> None:
        self.keys = keys
        """The keys that sign calls."""
        self._rules = rules or CallRules()
        self._queue_wait_s = queue_wait_s
        self._middleware = middleware
        self._tools = tools
        self._published: Sequence[ToolSpec] = ()
        self._listener = pool.events.id if pool is not None and pool.events is not None else None
        self._locator = SessionLocator(pool.sessions, pool.hosts, self._send_open, keys) if pool is not None else None
        self._delivery = Delivery(transport, keys, pool, self._locator)
        self._shared = _SharedCalls()

    # --- Calls -----------------------------------------------------------------------------------------------------

    async def dispatch(self, request: Request) -> ToolResult:
        """Return the one result of the call."""
        run = partial(self._run, request, self._call)
        result = await (self._shared.join(request, run) if request.digest else run())
        # The worker runs a tenant's own skill as skill_tool.
        name = request.call.name
        return result if result.name == name else result.model_copy(update={"name": name})

    async def send_order(self, call: ToolCall, tenant: str, session: str | None, queue: str | None = None) -> None:
        """Send `session.cancel` or `session.close` to the session's host or to the workers of `queue`. The order does
        not wait in the queue. There is no result.

        Raises BrokerUnavailable.
        """
        if queue is None and self._locator is not None and session is not None:
            address = self._locator.last_used(tenant, session)
            queue = address.queue if address is not None else None
        if queue is not None:
            await self._delivery.send_order(queue, call, tenant, session, self._queue_wait_s)

    def settle(self, tenant: str, call_id: str) -> None:
        """Delete the result of a call that was made with `keeps_result`. The caller must have stored the result
        elsewhere.
        """
        self._delivery.settle(tenant, call_id)

    # --- Sessions --------------------------------------------------------------------------------------------------

    async def open_session(self, tenant: str, session: str, spec: SessionSpec) -> ToolResult:
        """Open a session on a host with free capacity. Return the result of `session.open`."""
        request = _session_request("open", tenant, session, spec.host_arguments())

        async def work(_: Request) -> ToolResult:
            await self._check_tool_config(tenant, spec.tool_config)
            policy = await self._rules.tenants.policy(tenant)
            return await self.locator.open(tenant, session, policy, spec)

        return await self._run(request, work)

    async def close_session(self, tenant: str, session: str) -> ToolResult:
        """Close a session on its host and delete its address, even if the host was lost. Return the result of
        `session.close`.
        """
        return await self._run(_session_request("close", tenant, session), self._close_session)

    async def abandon_session(self, tenant: str, session: str) -> None:
        """Order the session's host to close it, without waiting in the host's queue, and delete the address. Raises
        BrokerUnavailable.
        """
        locator = self.locator
        if (address := await locator.last(tenant, session)) is not None:
            await self.send_order(_session_request("close", tenant, session).call, tenant, session, address.queue)
        await self._forget(tenant, session)

    async def add_forks(self, tenant: str, session: str, names: Sequence[str], facts: Mapping[str, Any]) -> None:
        """Record the locations of new sessions that a host has forked from a session. `facts`: the metadata of the
        result of `session.fork`. Raises ToolFailure(QUOTA_EXCEEDED), OperatorError.
        """
        policy = await self._rules.tenants.policy(tenant)
        await self.locator.add_forks(tenant, session, names, policy, facts)

    async def forget_sessions(self, tenant: str, sessions: Sequence[str]) -> None:
        """Record the end of sessions that no caller knows. A host that has such a session closes it soon. Raises
        BrokerUnavailable.
        """
        for session in sessions:
            await self._forget(tenant, session)

    async def capacity(self, tenant: str, image: str | None) -> HostCapacity | None:
        """Return the capacity of hosts for more sessions of a tenant; None when no host could ever take one. Raises
        ToolFailure, OperatorError.
        """
        return await self.locator.capacity(await self._rules.tenants.policy(tenant), image)

    def session_queue(self, tenant: str, session: str) -> str | None:
        """Return the queue to which the last call of the session went."""
        address = self._locator.last_used(tenant, session) if self._locator is not None else None
        return address.queue if address is not None else None

    async def any_queue(self, tenant: str) -> str:
        """Return the queue of any host, for work that every host can do. Raises ToolFailure, OperatorError."""
        return await self.locator.any_queue(await self._rules.tenants.policy(tenant))

    # --- One call --------------------------------------------------------------------------------------------------

    async def _run(self, request: Request, work: Callable[[Request], Awaitable[ToolResult]]) -> ToolResult:
        """Run `work` inside the middleware. Return its result, or a result with the reason for the failure."""
        call = request.call
        names = {
            "tenant": request.tenant,
            "session": request.session,
            "run": request.run,
            "call": call.id,
            "tool": call.name,
        }
        steps: Work = partial(self._answer, request, work)
        for middleware in reversed(self._middleware):
            steps = partial(middleware.run, request, steps)
        with bound(**{name: value for name, value in names.items() if value}):
            return await steps()

    async def _answer(self, request: Request, work: Callable[[Request], Awaitable[ToolResult]]) -> ToolResult:
        call, began = request.call, time.monotonic()
        try:
            result = await work(request)
        except ToolFailure as failure:
            result = ToolResult.failed(call, failure.code, failure.message, metadata=dict(failure.metadata))
        except ValidationError as error:
            result = ToolResult.failed(call, ErrorCode.INVALID_ARGUMENTS, f"{call.name}: {describe_invalid(error)}")
        except (DeliveryFailed, OperatorError) as error:
            log.error("call_not_served", tool=call.name, call=call.id, code=error.code.value, error=str(error))
            result = ToolResult.failed(call, error.code, str(error))
        total_s, clocks = time.monotonic() - began, result.clocks
        log.info("call_done", code=result.error_code, total_s=round(total_s, 4))
        transfer_s = max(0.0, total_s - clocks.queued_s - clocks.sandbox_s - clocks.run_s)
        return result.model_copy(update={"clocks": clocks.model_copy(update={"transfer_s": transfer_s})})

    async def _call(self, request: Request) -> ToolResult:
        checked = await self._check(request)
        return add_used_aliases(await self._delivery.deliver(checked), checked.aliases)

    async def _check(self, request: Request) -> CheckedRequest:
        """Check the call of a request. Raises ToolFailure for a call that must not be made, ConfigError,
        BrokerUnavailable.
        """
        call, tenant = request.call, request.tenant
        policy = await self._rules.policy(tenant, call.name)
        try:
            spec = await self._tools.find(call.name, tenant, request.audience)
        finally:
            # Announced even if the tool is unknown, because the search has read the published tools.
            self._announce_tools()
        for middleware in self._middleware:
            middleware.tool_found(spec)
        await self._rules.check_switch(spec, tenant)
        check = partial(prepare_arguments, spec, call.arguments, text=request.text_arguments)
        is_short = is_quick(spec, call.arguments, text=request.text_arguments)
        arguments, aliases = check() if is_short else await in_tenant_thread(tenant, check)
        if spec.name == SKILL_TOOL:
            # The arguments may name another tool.
            await self._rules.check_switch(spec, tenant, arguments)
        await check_policy(policy, tenant, spec, arguments)
        sent_at = self._delivery.clock()
        context = ToolContext(
            tenant=tenant,
            run=request.run,
            session=request.session,
            sent_at=sent_at,
            deadline_at=sent_at + self._queue_wait_s,
            timeout_s=await self._check_limit(effective_limit(spec, arguments, request), request, policy),
            blob=request.blob,
            model=request.model,
            events=self._listener if request.handlers else None,
            **await self._session_fields(request, spec),
        )
        if spec.is_installed_skill:
            skill_run = {"name": spec.name, "action": "run", "args": arguments}
            spec = await self._tools.find(SKILL_TOOL, tenant)
            skill_arguments, _ = prepare_arguments(spec, skill_run)
            worker_call = ToolCall(id=call.id, name=SKILL_TOOL, arguments=skill_arguments)
        else:
            worker_call = call.model_copy(update={"arguments": arguments})
        return CheckedRequest(
            **vars(request),
            spec=spec,
            worker_call=worker_call,
            policy=policy,
            context=context,
            aliases=aliases,
            queue_wait_s=self._queue_wait_s,
        )

    async def _check_tool_config(self, tenant: str, config: Mapping[str, object]) -> None:
        """Raise ToolFailure when the configuration names a tool that the tenant does not have."""
        for name in config:
            try:
                await self._tools.find(name, tenant)
            except ToolFailure as failure:
                raise ToolFailure(
                    ErrorCode.INVALID_ARGUMENTS, f"tool_config: {failure.message}; write the name of a tool"
                ) from failure

    async def _session_fields(self, request: Request, spec: ToolSpec) -> dict[str, Any]:
        """Return the fields of the context that come from the session of the call."""
        if request.session is None or self._locator is None or spec.audience == "session":
            return {}
        return await self._locator.call_fields(request.tenant, request.session, spec)

    async def _check_limit(self, limit_s: float, request: Request, policy: TenantPolicy) -> float:
        """Return the limit of the call within what the session's class allows. Raises ToolFailure when the caller
        itself asked for more.
        """
        if limit_s <= MAX_TIMEOUT_S or request.session is None or self._locator is None:
            return limit_s
        facts = await self._locator.facts(request.tenant, request.session)
        if facts is None or limit_s <= (most := float(facts.get("timeout_s", MAX_TIMEOUT_S))):
            return limit_s  # without facts, the session's host checks the limit
        if request.timeout_s is None:
            return most
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"{request.call.name} may run {most:g} s at most in sessions of class '{policy.sandbox.tenant_class}', not "
            f"{limit_s:g} s: ask for less, or ask the operator to raise `timeout_s` in `largest` of the class",
        )

    async def _close_session(self, request: Request) -> ToolResult:
        tenant, session = request.tenant, str(request.session)
        locator, until = self.locator, Backoff(RESEND_S)
        result = ToolResult(call_id=request.call.id, name=request.call.name, success=True, metadata={"closed": False})
        address = locator.last_used(tenant, session) or await locator.find_for_closing(tenant, session)
        while address is not None:
            closed = await self._close_at(address, tenant, session)
            if closed is not None:
                result = closed
                break
            # The session has moved, or its host restarts. Without this retry the session would hold its sandbox until
            # it expires.
            address = await locator.find_for_closing(tenant, session) if await until.wait() else None
        await self._forget(tenant, session)
        return result

    async def _forget(self, tenant: str, session: str) -> None:
        """Record the end of a session. Order a worker to end its MCP sessions, if there are any."""
        if await self.locator.forget(tenant, session):
            order = _session_request("close", tenant, session).call
            await self.send_order(order, tenant, session, POOL_QUEUES["tools"])

    async def _close_at(self, address: SessionAddress, tenant: str, session: str) -> ToolResult | None:
        """Return the result of closing the session at that address; None when no worker there took the call."""
        # Every attempt has its own call id, because an earlier one may still have a record.
        request = _session_request("close", tenant, session)
        try:
            result = await self._delivery.send_once(await self._check(request), address)
        except (NotSent, CallLost) as lost:
            log.info("session_closed_by_another_host", session=session, queue=address.queue, reason=str(lost))
            return None
        failure = result.run_failure
        return None if failure is not None and failure.is_temporary else result

    async def _send_open(self, opening: OpenRequest, address: SessionAddress) -> ToolResult:
        """Make one attempt at `session.open` at that address."""
        moved = {"moved": opening.moved.model_dump(mode="json")} if opening.moved is not None else {}
        arguments = opening.spec.host_arguments() | moved
        request = _session_request("open", opening.tenant, opening.session, arguments)
        return await self._delivery.send_once(await self._check(request), address)

    def _announce_tools(self) -> None:
        if self._tools.published is not self._published:
            self._published = self._tools.published
            for middleware in self._middleware:
                middleware.tools_changed(self._published)

    @property
    def locator(self) -> SessionLocator:
        """Return the object that finds the hosts of sessions. Raises ConfigError when there is no pool."""
        if self._locator is None:
            raise ConfigError("sessions need a pool of hosts, and this program has none: connect to a pool")
        return self._locator


@dataclass(frozen=True)
class _SharedCall:
    digest: str
    task: "asyncio.Task[ToolResult]"


class _SharedCalls:
    """The running calls of this process whose ids their callers chose: all callers of one id get one result.

    A caller that stops waiting does not end the call, because another one may wait for it or ask for its result later.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], _SharedCall] = {}

    async def join(self, request: Request, run: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        """Return the result of the call. `run` makes the call, unless this process makes a call with this id already.
        A call with other content is refused.
        """
        name = (request.tenant, request.call.id)
        shared = self._calls.get(name)
        if shared is None:
            shared = _SharedCall(request.digest, asyncio.ensure_future(run()))
            self._calls[name] = shared
            shared.task.add_done_callback(lambda _: self._calls.pop(name))
        if shared.digest != request.digest:
            return ToolResult.failed(
                request.call, ErrorCode.INVALID_ARGUMENTS, used_for_another_call(request.call.id).message
            )
        return await asyncio.shield(shared.task)


def _session_request(verb: str, tenant: str, session: str, arguments: Mapping[str, Any] | None = None) -> Request:
    call = ToolCall(id=secrets.token_hex(16), name=f"session.{verb}", arguments=dict(arguments or {}))
    timeout_s = ARCHIVE_TIMEOUT_S if call.arguments.keys() & {"restore", "workspace", "image"} else OPEN_TIMEOUT_S
    return Request(call, tenant, session, timeout_s=timeout_s, audience="session")


def add_used_aliases(result: ToolResult, used: list[str]) -> ToolResult:
    """Return the result with the aliases in `used` (`alias -> canonical`) in its metadata."""
    return result.model_copy(update={"metadata": {**result.metadata, "aliases_used": list(used)}}) if used else result


def effective_limit(spec: ToolSpec, arguments: Mapping[str, Any], request: Request) -> float:
    """Return the number of seconds that the call may run. This is the limit of the request, or else the `timeout`
    argument of the call, or else the tool's default; never more than the tool's maximum.
    """
    limit_s, own = request.timeout_s, arguments.get("timeout")
    if limit_s is None and isinstance(own, int | float) and not isinstance(own, bool) and own > 0:
        limit_s = own
    if limit_s is None:
        limit_s = spec.timeout_s if spec.timeout_s is not None else request.default_timeout_s
    return float(min(limit_s, largest_limit(spec, LONGEST_TIMEOUT_S)))
