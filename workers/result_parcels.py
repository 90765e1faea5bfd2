"""Results that are too large for their message: their record lies beside, under the tenant's key, and the message names it."""

import time
from collections.abc import Mapping
from typing import Any, Protocol

import structlog

from contract.calls import ToolCall, ToolContext, ToolResult
from contract.envelope import encode_result
from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from contract.signing import ResultSeal, SigningKeys

log = structlog.get_logger(__name__)

RECORD_TTL_S = 3600 + 60
"""Longer than Celery keeps the message that names it."""
KEEP_PATIENCE_S = 60.0
"""How long a result waits for a Redis that is away: a restart takes seconds, and the call has acted."""
PAUSE_S = 0.5


class BlobStore(Protocol):
    """Bytes beside the envelope. Raises ToolFailure when they are too many, BrokerUnavailable."""

    def leave(self, tenant: str, data: bytes, ttl_s: int) -> str: ...


def encode_parcel(result: ToolResult, call: ToolCall, context: ToolContext, blobs: BlobStore, keys: SigningKeys) -> Mapping[str, Any]:
    """The encoded result, signed with `keys`; what is larger than a message carries is left in `blobs`. One that cannot be kept becomes one that says so."""

    seal = ResultSeal(keys, context.tenant, context.attempt)

    def keep(data: bytes) -> str:
        until = time.monotonic() + KEEP_PATIENCE_S
        while True:
            try:
                return blobs.leave(context.tenant, data, RECORD_TTL_S)
            except BrokerUnavailable as error:
                if time.monotonic() > until:
                    raise
                log.warning("result_waits_for_redis", call=call.id, error=str(error))
                time.sleep(PAUSE_S)

    try:
        return encode_result(result, keep, seal)
    except (BrokerUnavailable, ToolFailure) as error:
        log.error("result_not_kept", tool=call.name, call=call.id, error=str(error))
        told = f"the call has run, and its result is lost: {error}"
        lost = ToolResult.failed(call, ErrorCode.OUTCOME_UNKNOWN, told, clocks=result.clocks, sandbox=result.sandbox)
        return encode_result(lost, seal=seal)
