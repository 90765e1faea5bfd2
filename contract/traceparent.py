"""Which span a call belongs to, as it travels: the traceparent of W3C's Trace Context, version 00."""

import hashlib
import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

_SHAPE = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)
_NOTHING = "0"


@dataclass(frozen=True, slots=True)
class SpanRef:
    """A span, by the ids of its trace and its own in hexadecimal. `is_sampled`: it is recorded, and so is what belongs
    to it.
    """

    trace_id: str
    span_id: str
    is_sampled: bool = True

    def __str__(self) -> str:
        """The traceparent."""
        return f"00-{self.trace_id}-{self.span_id}-0{int(self.is_sampled)}"


def parse_traceparent(text: str) -> SpanRef:
    """The span that a traceparent names. Raises ValueError for what is none, and for ids that are all zeros."""
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise ValueError("no traceparent: write it as 00-<32 digits>-<16 digits>-<2 digits>, in lower-case hexadecimal")
    trace_id, span_id, flags = found.groups()
    if not trace_id.strip(_NOTHING) or not span_id.strip(_NOTHING):
        raise ValueError("no traceparent: give ids that are not all zeros")
    return SpanRef(trace_id, span_id, bool(int(flags, 16) & 1))


def _check(text: str) -> str:
    if str(parse_traceparent(text)) != text:
        raise ValueError("no traceparent of ours: leave all flags but `sampled` out")
    return text


Traceparent = Annotated[str, AfterValidator(_check)]
"""In the one form in which it travels here: of its flags none but `sampled`."""


def derive_id(*parts: str) -> str:
    """64 hexadecimal digits made of these names. Whoever knows them finds the same id: another process that goes on
    with a run, and a run's trace file.
    """
    return hashlib.sha256("\0".join(("toolcrew", *parts)).encode(errors="surrogatepass")).hexdigest()


def trace_id_of(tenant: str, run: str) -> str:
    """Of a run's trace."""
    return derive_id("trace", tenant, run)[:32]


def run_span_id(tenant: str, run: str) -> str:
    """Of the span of a whole run."""
    return derive_id("run", tenant, run)[:16]


def call_span_id(call: str) -> str:
    """Of the span of a call."""
    return derive_id("call", call)[:16]


def attempt_span_id(call: str, attempt: int) -> str:
    """Of the span of one attempt at a call: from sending it until its answer is there."""
    return derive_id("attempt", call, str(attempt))[:16]
