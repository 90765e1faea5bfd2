"""A span while it lasts, and the tracer that begins spans and hands ended ones on. Knows nothing of OpenTelemetry."""

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from contract.masking import Masker
from contract.traceparent import SpanRef
from telemetry import names

Kind = Literal["internal", "client", "producer", "consumer"]
Value = str | bool | int | float | list[str]
Attributes = Mapping[str, Value | None]
"""None: the attribute is not there."""

MAX_TEXT_CHARS = 256
MAX_CONTENT_CHARS = 8 * 1024
"""Of a text that belongs to arguments, results or messages."""
MARGIN_CHARS = 4 * 1024
"""What is looked at beyond that, for secrets that begin before it."""
MAX_ITEMS = 32
_MAX_INT = 2**63 - 1
_CONTENT = frozenset({names.TOOL_ARGUMENTS, names.TOOL_RESULT, names.INPUT_MESSAGES, names.OUTPUT_MESSAGES})
# What a viewer's terminal or page would obey, and halves of surrogate pairs, which no UTF-8 carries.
_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(slots=True)
class Span:
    """One span. Instants in Unix seconds. One that is not sampled only hands its ids on."""

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
        """Take these attributes over, cleaned and cut."""
        if self.ref.is_sampled:
            self.attributes.update(clean(attributes))

    def end(self, *, error: str | None = None, at: float | None = None) -> None:
        """It is over, once. `error`: the class of what went wrong."""
        hand_on, self._hand_on = self._hand_on, None
        if hand_on is None or not self.ref.is_sampled:
            return
        self.end_at = max(self.start_at, time.time() if at is None else at)
        if error:
            self.error = clean_text(error)
            self.attributes[names.ERROR] = self.error
        hand_on(self)

    def discard(self) -> None:
        """It is not told of: whoever goes on with what it covers tells of all of it."""
        self._hand_on = None


@dataclass(frozen=True)
class Tracer:
    """Begins spans. `samples`: whether a trace of that id is recorded; `ambient`: the span that this program is in by
    itself.

    `has_content`: texts of models, arguments and results are told, too, masked by `masker`.
    """

    hand_on: Callable[[Span], None]
    samples: Callable[[str], bool]
    ambient: Callable[[], SpanRef | None] = lambda: None
    has_content: bool = False
    masker: Masker = field(default_factory=Masker)
    close: Callable[[], None] = lambda: None
    """Sends what has ended, as far as that can be had in a moment."""

    def root(self, trace_id: str | None = None, span_id: str | None = None) -> SpanRef:
        """The ids of a trace's first span."""
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
        """A span that has begun; `ref`: under ids that are made already, else below `parent`, else a trace of its
        own.
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
        """The attribute of that name with a text of the run, masked and cut; nothing unless that was asked for."""
        if not self.has_content:
            return {}
        text = build()
        # Masked before it is cut: half a secret looks like none.
        kept = self.masker.mask(text[: MAX_CONTENT_CHARS + MARGIN_CHARS])
        return {name: _cut(kept, MAX_CONTENT_CHARS, max(0, len(text) - MAX_CONTENT_CHARS - MARGIN_CHARS))}


def clean(attributes: Attributes) -> dict[str, Value]:
    """Attributes that any collector takes: bounded, and without what a viewer would obey."""
    told = {}
    for name, value in attributes.items():
        if value is not None:
            # Of a cut text the note on what is left out is kept.
            told[name] = _clean(value, MAX_CONTENT_CHARS + MAX_TEXT_CHARS if name in _CONTENT else MAX_TEXT_CHARS)
    return told


def clean_text(text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """At most about `limit` characters; what was left out is counted."""
    if len(text) <= limit and text.isprintable():
        # As nearly all are; of what is told apart below nothing is printable.
        return text
    return _UNSHOWN.sub(lambda found: f"\\u{ord(found[0]):04x}", _cut(text, limit))


def _cut(text: str, limit: int, more: int = 0) -> str:
    """`more`: characters that are left out already."""
    left_out = more + max(0, len(text) - limit)
    return f"{text[:limit]}... [{left_out} characters left out]" if left_out else text


def _clean(value: Value, limit: int) -> Value:
    if isinstance(value, str):
        return clean_text(value, limit)
    if isinstance(value, list):
        return [clean_text(one, limit) for one in value[:MAX_ITEMS]]
    if isinstance(value, int) and abs(value) > _MAX_INT:
        return clean_text(hex(value), limit)
    return value
