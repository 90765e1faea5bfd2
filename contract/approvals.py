"""The decision about a call that needs approval, and the digest that binds the decision to that call."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contract.calls import ToolCall


@dataclass(frozen=True)
class Decision:
    """Yes or no, with a reason the model may read. `arguments`: run with these instead; they are checked again.

    `digest`: of the request that is answered, for approvers whose answers come from elsewhere; one of another request
    does not count.
    """

    is_allowed: bool
    reason: str = ""
    arguments: Mapping[str, Any] | None = None
    digest: str = ""


def digest_call(call: ToolCall, tenant: str, session: str | None = None) -> str:
    """SHA-256, in hexadecimal, over the canonical JSON of tenant, session, call id, tool and arguments.

    Raises ValueError when the arguments have no canonical JSON (NaN, or nested too deep).
    """
    return hashlib.sha256(canonical_json([tenant, session, call.id, call.name, call.arguments]).encode()).hexdigest()


def canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
