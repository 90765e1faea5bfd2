"""Spans, and the tracer that starts spans and exports ended ones. Independent of OpenTelemetry."""

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from toolcrew.contract.masking import Masker
from toolcrew.contract.traceparent import SpanRef
from toolcrew.telemetry import names

Kind = Literal["internal", "client", "producer", "consumer"]
Value = str | bool | int | float | list[str]
Attributes = Mapping[str, Value | None]
"""Attributes of a span. An attribute with the value None is omitted."""

MAX_TEXT_CHARS = 256
MAX_CONTENT_CHARS = 8 * 1024
"""Limit, in characters, of a text of arguments, results or messages in a span."""
MARGIN_CHARS = 4 * 1024
"""Characters beyond MAX_CONTENT_CHARS that are also searched for secrets, because a secret may begin before that limit.
"""
MAX_ITEMS = 32
_MAX_INT = 2**63 - 1
_CONTENT = frozenset({names.TOOL_ARGUMENTS, names.TOOL_RESULT, names.INPUT_MESSAGES, names.OUTPUT_MESSAGES})
# Control characters for a terminal or a page, and lone surrogates, which UTF-8 cannot encode.
_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(slots=True)
class Span:
    """One span. Times are Unix seconds. A span that is not sampled only passes its ids to its children."""

    ref: SpanRef
    name: str
    kind: Kind
    parent: SpanRef | None
    start_at: float
    attributes: dict[str, Value]
    links: tuple[SpanRef, ...] = ()
    end_at: float = 0.0
    error: str = ""
    _hand_on: Callable[["Span"], None] | None = None

    def set(self, attributes: Attributes) -> None:
        """Add these attributes to the span. Long texts are cut, and control characters are removed."""
        if self.ref.is_sampled:
            self.attributes.update(clean(attributes))

    def end(self, *, error: str | None = None, at: float | None = None) -> None:
        """End and export the span. Further calls have no effect. `error`: the class of the error."""
        hand_on, self._hand_on = self._hand_on, None
        if hand_on is None or not self.ref.is_sampled:
            return
        self.end_at = max(self.start_at, time.time() if at is None else at)
        if error:
            self.error = clean_text(error)
            self.attributes[names.ERROR] = self.error
        hand_on(self)

    def discard(self) -> None:
        """Drop the span without exporting it, because another process continues the operation and exports a span for
        it.
        """
        self._hand_on = None


@dataclass(frozen=True)
class Tracer:
    """Starts spans. `samples`: returns whether a trace of that id is recorded. `ambient`: returns the current span of
    the program.

    `has_content`: spans contain texts of models, arguments and results, masked by `masker`.
    """

    hand_on: Callable[[Span], None]
    samples: Callable[[str], bool]
    ambient: Callable[[], SpanRef | None] = lambda: None
    has_content: bool = False
    masker: Masker = field(default_factory=Masker)
    close: Callable[[], None] = lambda: None
    """Sends the ended spans, within a short time limit."""

    def root(self, trace_id: str | None = None, span_id: str | None = None) -> SpanRef:
        """Return the reference of the first span of a trace. An id that is None gets a random value."""
        trace_id = trace_id or secrets.token_hex(16)
        return SpanRef(trace_id, span_id or secrets.token_hex(8), self.samples(trace_id))

    def start(
        self,
        name: str,
        attributes: Attributes,
        *,
        kind: Kind = "internal",
        parent: SpanRef | None = None,
        ref: SpanRef | None = None,
        links: Sequence[SpanRef] = (),
        at: float | None = None,
    ) -> Span:
        """Start a span. With `ref`, the span has the ids of `ref`. Otherwise the span is a child of `parent`. Without
        both, the span begins a new trace.
        """
        if ref is None:
            ref = (
                SpanRef(parent.trace_id, secrets.token_hex(8), parent.is_sampled) if parent is not None else self.root()
            )
        if not ref.is_sampled:
            return Span(ref, "", kind, parent, 0.0, {})
        started = time.time() if at is None else at
        return Span(
            ref, clean_text(name), kind, parent, started, clean(attributes), tuple(links), _hand_on=self.hand_on
        )

    def content(self, name: str, build: Callable[[], str]) -> Attributes:
        """Return an attribute with a text of the run, masked and cut; no attribute if `has_content` is false."""
        if not self.has_content:
            return {}
        text = build()
        # Mask before cutting: half of a secret would not be recognized.
        masked = self.masker.mask(text[: MAX_CONTENT_CHARS + MARGIN_CHARS])
        return {name: _cut(masked, MAX_CONTENT_CHARS, max(0, len(text) - MAX_CONTENT_CHARS - MARGIN_CHARS))}


def clean(attributes: Attributes) -> dict[str, Value]:
    """Return attributes that every collector accepts: limited in size, and without control characters."""
    cleaned = {}
    for name, value in attributes.items():
        if value is not None:
            # The extra characters leave space for the note at the end of a cut text.
            cleaned[name] = _clean(value, MAX_CONTENT_CHARS + MAX_TEXT_CHARS if name in _CONTENT else MAX_TEXT_CHARS)
    return cleaned


def clean_text(text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """Return at most about `limit` characters of the text, with the number of characters that were cut."""
    if len(text) <= limit and text.isprintable():
        # Fast path for nearly all texts: a printable text has no character that the code below escapes.
        return text
    return _UNSHOWN.sub(lambda match: f"\\u{ord(match[0]):04x}", _cut(text, limit))


def _cut(text: str, limit: int, more: int = 0) -> str:
    """Return the text, cut to `limit` characters. `more`: number of characters that were omitted before."""
    left_out = more + max(0, len(text) - limit)
    return f"{text[:limit]}... [{left_out} characters left out]" if left_out else text


def _clean(value: Value, limit: int) -> Value:
    if isinstance(value, str):
        return clean_text(value, limit)
    if isinstance(value, list):
        return [clean_text(item, limit) for item in value[:MAX_ITEMS]]
    if isinstance(value, int) and abs(value) > _MAX_INT:
        return clean_text(hex(value), limit)
    return value
