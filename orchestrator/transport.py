"""What carries an envelope to whoever runs it and its answer back; and the one that runs plain functions in this process."""

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from contract.calls import ToolResult
from contract.envelope import decode_call, encode_result
from contract.errors import ErrorCode, ToolFailure


@dataclass(frozen=True)
class Delivery:
    """One envelope on its way. `start_by`: Unix seconds after which it must not start; `wait_s`: when the sender gives up.

    `marker`: the key that exists once the call has started.
    """

    task: str
    queue: str
    call_id: str
    envelope: str
    start_by: float
    wait_s: float
    marker: str


class DeliveryFailed(Exception):
    """The call did not come back with a result of ours."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Transport(Protocol):
    """Carries envelopes. `deliver` gives the encoded result, raises DeliveryFailed, or TimeoutError after `wait_s`."""

    async def deliver(self, delivery: Delivery) -> Any: ...

    async def command(self, queue: str, envelope: str) -> None:
        """Tell a host at once, past its queue; nothing comes back. Raises BrokerUnavailable."""
        ...

    async def aclose(self) -> None: ...


class InProcessTransport:
    """Plain functions as tools, for tests and for programs without a pool: same envelopes, no queue, no sandbox, no walls."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], key: bytes) -> None:
        self._functions = dict(functions)
        self._key = key
        self.delivered: list[Delivery] = []

    async def deliver(self, delivery: Delivery) -> Any:
        """Run the function of the call's name with its arguments; what it raises becomes the result."""
        self.delivered.append(delivery)
        call, context = decode_call(delivery.envelope, self._key)
        started = time.monotonic()
        try:
            async with asyncio.timeout(min(context.timeout_s, delivery.wait_s)):
                value = self._functions[call.name](**call.arguments)
                value = await value if inspect.isawaitable(value) else value
            result = ToolResult(call_id=call.id, name=call.name, success=True, output=str(value))
        except TimeoutError:
            result = ToolResult.failed(call, ErrorCode.TIMEOUT, f"{call.name} did not end within its limit of {context.timeout_s:g} s")
        except ToolFailure as failure:
            result = ToolResult.failed(call, failure.code, failure.message)
        except Exception as error:  # noqa: BLE001  # the edge: a user's function may raise anything, and the loop goes on
            result = ToolResult.failed(call, ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
        clocks = result.clocks.model_copy(update={"run_s": time.monotonic() - started})
        return encode_result(result.model_copy(update={"clocks": clocks}))

    async def command(self, queue: str, envelope: str) -> None:
        """Nothing to tell: a function runs where it was called."""

    async def aclose(self) -> None:
        """Nothing to close."""
