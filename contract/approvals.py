"""The decision about a call that needs approval, and the digest that binds the decision to that call."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolcrew.contract.calls import ToolCall


@dataclass(frozen=True)
class Decision:
    """Decision whether a call may run, with a reason for the model.

    `arguments`: changed arguments, which are validated again. `digest`: the digest of the approval request that this
    decision answers. An approver that receives decisions from another process sets it; a decision with the digest of
    another request is ignored.
    """

    is_allowed: bool
    reason: str = ""
    arguments: Mapping[str, Any] | None = None
    digest: str = ""


def digest_call(call: ToolCall, tenant: str, session: str | None = None) -> str:
    """Return the hexadecimal SHA-256 of the canonical JSON of tenant, session, call id, tool and arguments.

    Raises ValueError if the arguments have no canonical JSON (NaN, or nested too deep).
    """
    return hashlib.sha256(canonical_json([tenant, session, call.id, call.name, call.arguments]).encode()).hexdigest()


def canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
