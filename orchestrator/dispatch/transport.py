"""Transport: carries the signed envelope of a call to a worker, and the result back."""

from typing import Any, Protocol

from toolcrew.contract.errors import ErrorCode
from toolcrew.orchestrator.dispatch.request import Attempt


class CallLost(Exception):
    """The worker or the host of the call was lost, and no result will come. `has_started`: the call may have acted.
    `reason`: the cause, for the result's message.
    """

    def __init__(self, reason: str, *, has_started: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.has_started = has_started


class CallSentAgain(Exception):
    """Another process has sent a later attempt at the call, whose caller chose its id."""


class DeliveryFailed(Exception):
    """Raised when a call has no valid result. The message says why."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class CallIdInUse(DeliveryFailed):
    """Raised when another call with the same id is running or waiting. The record of that id belongs to that call, not
    to this one.
    """

    def __init__(self, call_id: str) -> None:
        super().__init__(
            ErrorCode.INVALID_ARGUMENTS,
            f"the call id '{call_id}' is in use by a call in flight: give each call its own id",
        )


def used_for_another_call(call_id: str) -> DeliveryFailed:
    """Return the failure of a call whose id was used with other content."""
    return DeliveryFailed(
        ErrorCode.INVALID_ARGUMENTS,
        f"the call id '{call_id}' was used for another call: give each call its own id",
    )


def result_expired(call_id: str) -> DeliveryFailed:
    """Return the failure of a call that has ended, and whose result is no longer stored."""
    return DeliveryFailed(
        ErrorCode.RESULT_EXPIRED,
        f"the call '{call_id}' ran before and its result has expired, so it was not run again: use a new id to run it "
        "again",
    )


class Transport(Protocol):
    """Carries envelopes. `deliver` returns the encoded result. Raises DeliveryFailed, NotSent, CallLost,
    CallSentAgain, BrokerUnavailable, and TimeoutError after the request's `wait_s`.
    """

    async def deliver(self, attempt: Attempt) -> Any: ...

    def settle(self, tenant: str, call_id: str) -> None:
        """Delete the result of a call that was sent with `keeps_result`. The caller must have stored the result
        elsewhere.
        """
        ...

    async def send_order(self, queue: str, envelope: str) -> None:
        """Send an order to the workers of a queue. The order does not wait in the queue. There is no result. Raises
        BrokerUnavailable.
        """
        ...

    async def aclose(self) -> None: ...
