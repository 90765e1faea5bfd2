"""Reference to the parent span of a call, as the traceparent of W3C Trace Context, version 00."""

import hashlib
import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

_SHAPE = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)
_NOTHING = "0"


@dataclass(frozen=True, slots=True)
class SpanRef:
    """Hexadecimal ids of a span and its trace. `is_sampled`: the span and its children are recorded."""

    trace_id: str
    span_id: str
    is_sampled: bool = True

    def __str__(self) -> str:
        """Return the text of the traceparent header."""
        return f"00-{self.trace_id}-{self.span_id}-0{int(self.is_sampled)}"


def parse_traceparent(text: str) -> SpanRef:
    """Return the span of a traceparent. Raises ValueError for an invalid text, and for ids that are all zeros."""
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise ValueError(
            "not a traceparent: write it as 00-<32 digits>-<16 digits>-<2 digits>, in lower-case hexadecimal"
        )
    trace_id, span_id, flags = match.groups()
    if not trace_id.strip(_NOTHING) or not span_id.strip(_NOTHING):
        raise ValueError("not a traceparent: use ids that are not all zeros")
    return SpanRef(trace_id, span_id, bool(int(flags, 16) & 1))


def _check(text: str) -> str:
    if str(parse_traceparent(text)) != text:
        raise ValueError("the traceparent has unsupported flags: set no flag except `sampled`")
    return text


Traceparent = Annotated[str, AfterValidator(_check)]
"""Text of a traceparent. Validation rejects every flag except `sampled`."""


def derive_id(*parts: str) -> str:
    """Return 64 hexadecimal digits derived from these names. Another process that resumes a run, and the trace file of
    the run, derive the same id.
    """
    return hashlib.sha256("\0".join(("toolcrew", *parts)).encode(errors="surrogatepass")).hexdigest()


def trace_id_of(tenant: str, run: str) -> str:
    """Return the trace id of a run."""
    return derive_id("trace", tenant, run)[:32]


def run_span_id(tenant: str, run: str) -> str:
    """Return the span id of a whole run."""
    return derive_id("run", tenant, run)[:16]


def call_span_id(call: str) -> str:
    """Return the span id of a call."""
    return derive_id("call", call)[:16]


def attempt_span_id(call: str, attempt: int) -> str:
    """Return the span id of one attempt of a call, from sending the call until its result arrives."""
    return derive_id("attempt", call, str(attempt))[:16]
