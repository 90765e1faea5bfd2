"""ToolCall -> ToolResult: the only door to the workers. May it run, where, until when; and always a result."""

import asyncio
import contextlib
import difflib
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import JsonValue, ValidationError

from contract.calls import DEFAULT_TIMEOUT_S, GRACE_S, ToolCall, ToolContext, ToolResult
from contract.envelope import decode_result, encode_call
from contract.errors import BrokerUnavailable, ConfigError, EnvelopeRefused, ErrorCode, OperatorError, ToolFailure
from contract.names import POOL_QUEUES, run_marker_key, task_name
from contract.schema import prepare_arguments
from contract.specs import ToolSpec
from orchestrator.call_events import CallEvents
from orchestrator.catalog import CatalogSource
from orchestrator.heard_calls import Handler
from orchestrator.logs import get_logger
from orchestrator.switches import SwitchSource
from orchestrator.transport import Delivery, DeliveryFailed, Transport

log = get_logger(__name__)

SANDBOX_GRACE_S = 20.0
"""Beyond a call's limit and grace: sandboxd may have to remove a container, which the engine may do slowly."""


@dataclass(frozen=True)
class Route:
    """For whom a call runs, and on which queue when its tool has none of its own (contract/names.py: POOL_QUEUES)."""

    tenant: str
    session: str | None
    queue: str


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
    handlers: Mapping[str, Handler] = field(default_factory=dict)
    """By kind (contract/call_events.py): who is told what the call says while it runs."""
    config: Mapping[str, JsonValue] = field(default_factory=dict)
    """What tools find in their context's configuration."""


class Dispatcher:
    """Checks, signs, sends, awaits. Never raises for a call's failure, whoever's it is."""

    def __init__(
        self,
        transport: Transport,
        catalog: CatalogSource,
        key: bytes,
        *,
        queue_wait_s: float,
        deployment: str = "default",
        events: CallEvents | None = None,
        switches: SwitchSource | None = None,
    ) -> None:
        self._transport = transport
        self._catalog = catalog
        self._key = key
        self._queue_wait_s = queue_wait_s
        self._deployment = deployment
        self._events = events
        self._switches = switches

    async def dispatch(self, call: ToolCall, route: Route, terms: Terms | None = None) -> ToolResult:
        """The one result of the call."""
        started = time.monotonic()
        try:
            result = await self._dispatch(call, route, terms or Terms())
        except ToolFailure as failure:
            return ToolResult.failed(call, failure.code, failure.message, metadata=dict(failure.metadata))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            return ToolResult.failed(call, ErrorCode.INVALID_ARGUMENTS, f"{call.name}: {where}: {first['msg']}")
        except (DeliveryFailed, OperatorError) as error:
            log.error("call_not_served", tool=call.name, call=call.id, code=error.code.value, error=str(error))
            return ToolResult.failed(call, error.code, str(error))
        clocks = result.clocks
        known = clocks.queued_s + clocks.sandbox_s + clocks.run_s
        return result.model_copy(update={"clocks": clocks.model_copy(update={"transfer_s": max(0.0, time.monotonic() - started - known)})})

    async def command(self, call: ToolCall, route: Route) -> None:
        """Tell the session's host, or a pool, at once, past its queue: `session.cancel` or `session.close`. Nothing comes back.

        Raises BrokerUnavailable.
        """
        now = time.time()
        context = ToolContext(tenant=route.tenant, session=route.session, sent_at=now, deadline_at=now + self._queue_wait_s)
        await self._transport.command(route.queue, encode_call(call, context, self._key))

    async def _dispatch(self, call: ToolCall, route: Route, terms: Terms) -> ToolResult:
        spec = await self._find(call.name, terms.audience)
        await self._check_switch(spec)
        arguments, aliases = prepare_arguments(spec, call.arguments, text=terms.text_arguments)
        limit_s = effective_limit(spec, arguments, terms)
        sent_at = time.time()
        context = ToolContext(
            tenant=route.tenant,
            run=terms.run,
            session=route.session,
            sent_at=sent_at,
            deadline_at=sent_at + self._queue_wait_s,
            timeout_s=limit_s,
            blob=terms.blob,
            model=terms.model,
            config=dict(terms.config),
            events=self._events.listener if self._events is not None and terms.handlers else None,
        )
        pool = POOL_QUEUES.get(spec.pool)
        delivery = Delivery(
            task=task_name(spec.name),
            queue=pool or route.queue,
            call_id=call.id,
            envelope=self._encode(call.model_copy(update={"arguments": arguments}), context),
            start_by=context.deadline_at,
            wait_s=self._queue_wait_s + limit_s + GRACE_S + SANDBOX_GRACE_S,
            marker=run_marker_key(self._deployment, route.tenant, call.id),
            limit_s=limit_s if pool else None,
        )
        try:
            return note_aliases(await self._deliver_heard(delivery, call, route, terms), aliases)
        except asyncio.CancelledError:
            if pool is not None:
                # The host of the session, whom the session tells, does not run it.
                await asyncio.shield(self._cancel(call, Route(route.tenant, route.session, pool)))
            raise

    async def _cancel(self, call: ToolCall, route: Route) -> None:
        """Best effort: when Redis is away the call runs into its own limit."""
        order = ToolCall(id=secrets.token_hex(16), name="session.cancel", arguments={"call_id": call.id})
        with contextlib.suppress(BrokerUnavailable):
            await self.command(order, route)

    async def _deliver_heard(self, delivery: Delivery, call: ToolCall, route: Route, terms: Terms) -> ToolResult:
        """The result; before it come all events of the call, when somebody wants them."""
        if self._events is None:
            return await self._deliver(delivery, call)
        async with self._events.listen(route.tenant, call.id, terms.handlers, delivery.wait_s) as heard:
            result = await self._deliver(delivery, call)
        return result if heard is None else heard.note(result)

    async def _check_switch(self, spec: ToolSpec) -> None:
        """Raises ToolFailure for a tool that an administrator has turned off, BrokerUnavailable when that is not known."""
        if self._switches is not None and spec.audience == "model":
            switch = (await self._switches.switches()).get(spec.name)
            if switch is not None:
                raise ToolFailure(ErrorCode.TOOL_DISABLED, switch.refusal(spec.name))

    async def _deliver(self, delivery: Delivery, call: ToolCall) -> ToolResult:
        try:
            result = decode_result(await self._transport.deliver(delivery))
        except TimeoutError:
            raise DeliveryFailed(
                ErrorCode.OUTCOME_UNKNOWN,
                f"no result within {delivery.wait_s:.0f} s: the worker or its host may be gone, and the call may or may not have acted",
            ) from None
        except EnvelopeRefused as error:
            raise DeliveryFailed(ErrorCode.ENVELOPE_REFUSED, f"the result was refused: {error}") from error
        if result.call_id != call.id:
            raise DeliveryFailed(ErrorCode.ENVELOPE_REFUSED, "the result belongs to another call")
        return result

    async def _find(self, name: str, audience: str) -> ToolSpec:
        specs = [spec for spec in await self._catalog.specs() if spec.audience == audience]
        for spec in specs:
            if spec.name == name:
                return spec
        missing = self._catalog.explain_missing(name)
        if missing is not None:
            raise ConfigError(missing)
        raise ToolFailure(ErrorCode.TOOL_NOT_FOUND, f"Tool not found: {name}", nearest=find_nearest(name, [spec.name for spec in specs]))

    def _encode(self, call: ToolCall, context: ToolContext) -> str:
        try:
            return encode_call(call, context, self._key)
        except ValueError as error:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, str(error)) from error


def find_nearest(name: str, names: Iterable[str]) -> list[str]:
    """The three names most like `name`, best first."""
    return difflib.get_close_matches(name, list(names), n=3, cutoff=0.0)


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
