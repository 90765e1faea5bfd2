"""Scripts of the model server: the records of their lines. A script is read from JSONL and checked completely before
the server starts.

conversation  what `key` finds in the first user message, otherwise a hash of it
step          the number of assistant messages
when          `conversation`, `step`, `observation` (pattern for the last tool result); the first matching rule answers
reply         `text`, `calls`, `chunks`, `whole`, `finish_reason`, `usage`, `spelling` (`native`, `tags`, `json`),
              `first_byte_s`, `chunk_s`
templates     `{{item}}`, `{{step}}`, `{{attempt}}`, `{{user}}`, `{{observation}}`, `{{match.NAME}}`;
              filters `strip`, `first_line`, `last_line`, `number`, `int`
faults        `status`, `delay`, `cut`, `no_end`, `shape`; how often: `first`, `per`, `probability`, `during_s`
counters      `GET /stats` (`requests`, `replies`, `replies_repeated`, `identical_requests`, `faults`, ...), `POST /reset`
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, TypeAdapter, ValidationError, field_validator, model_validator

from tests.model_server.templates import find_unknown_places
from toolcrew.contract.calls import Record

DEFAULT_KEY = r"\[item ([^\]\s]+)\]"
MAX_SHOWN = 20
_GUIDE = "tests/model_server/script.py"

Span = (
    Annotated[float, Field(ge=0, le=3600)]
    | tuple[Annotated[float, Field(ge=0, le=3600)], Annotated[float, Field(ge=0, le=3600)]]
)
"""Seconds. A pair is a range from which the seed draws a value."""


class BadScript(ValueError):
    """A script or a recording that cannot be played. The message has a sentence for each invalid line, with the fix."""


def _check_pattern(pattern: str | None) -> str | None:
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"not a regular expression ({error}): correct it, or escape what is meant as it stands with a backslash"
            ) from None
    return pattern


class Server(Record):
    """Settings of the whole script; at most one such line. `key`: a pattern for the first user message of a
    conversation. Its first group is the name of the conversation. Without `key`, the name is a hash of that message.
    """

    kind: Literal["server"]
    seed: int = 0
    model: str = Field(default="played", min_length=1)
    key: str = DEFAULT_KEY
    first_byte_s: Span = 0
    chunk_s: Span = 0
    chunk_chars: int = Field(default=64, ge=1)
    answers_probes: bool = True
    context_window: int | None = Field(default=None, gt=0)

    @field_validator("key")
    @classmethod
    def _has_one_group(cls, key: str) -> str:
        _check_pattern(key)
        if re.compile(key).groups != 1:
            raise ValueError("write exactly one group ( ) into it: what the group finds is the conversation's name")
        return key


class When(Record):
    """The requests to which a line applies. A missing field matches everything. `observation` and `user` are regular
    expressions, searched in the result of the last call and in the first user message.
    """

    conversation: str | tuple[str, ...] | None = None
    step: int | tuple[int, ...] | None = None
    observation: str | None = None
    user: str | None = None

    _patterns = field_validator("observation", "user")(_check_pattern)

    @property
    def conversations(self) -> tuple[str, ...] | None:
        return (self.conversation,) if isinstance(self.conversation, str) else self.conversation

    @property
    def steps(self) -> tuple[int, ...] | None:
        return (self.step,) if isinstance(self.step, int) else self.step


class Call(Record):
    """A tool call. Arguments given as text are sent unchanged, even if the text is not JSON."""

    name: str
    arguments: dict[str, JsonValue] | str = Field(default_factory=dict)


class Tokens(Record):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)


class Reply(Record):
    """A reply: a text, calls or both, or raw chunks. A chunk that is a text is sent without JSON encoding.

    `spelling`: the format of calls; auto uses the format of the request's dialect. `whole`: replaces `chunks` for a
    request without streaming.
    """

    text: str = ""
    calls: tuple[Call, ...] = ()
    spelling: Literal["auto", "native", "tags", "json"] = "auto"
    chunks: tuple[JsonValue, ...] | None = None
    whole: JsonValue = None
    finish_reason: str | None = None
    usage: Tokens | None = None
    first_byte_s: Span | None = None
    chunk_s: Span | None = None
    chunk_chars: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _is_one_thing(self) -> "Reply":
        if self.chunks is not None and (self.text or self.calls or self.finish_reason or self.usage):
            raise ValueError("chunks stand alone: take text, calls, finish_reason and usage out, or the chunks")
        if self.whole is not None and self.chunks is None:
            raise ValueError(
                "whole goes with chunks: add them, or take it out, then whole replies are made of text and calls"
            )
        if self.spelling == "json" and len(self.calls) > 1:
            raise ValueError("the json spelling has room for one call a reply: give the others in later steps")
        return self


class Rule(Record):
    """The reply to the requests that match `when`. The first matching rule applies."""

    kind: Literal["rule"]
    when: When = When()
    reply: Reply

    @model_validator(mode="after")
    def _can_be_filled(self) -> "Rule":
        groups = (
            frozenset(re.compile(self.when.observation).groupindex)
            if self.when.observation is not None
            else frozenset()
        )
        calls = [call.arguments for call in self.reply.calls] + [call.name for call in self.reply.calls]
        texts: list[Any] = [self.reply.text, *calls, *(self.reply.chunks or ()), self.reply.whole]
        unknown = [item for text in texts for item in find_unknown_places(text, groups)]
        if unknown:
            raise ValueError("; ".join(unknown))
        return self


class Status(Record):
    """An error status. `retry_after`: seconds, sent in the header of that name."""

    kind: Literal["status"]
    status: int = Field(ge=400, le=599)
    retry_after: float | None = Field(default=None, ge=0)
    message: str = "the script says so"


class Delay(Record):
    """A late reply. The delay is added to the other delays."""

    kind: Literal["delay"]
    first_byte_s: Span = 0
    chunk_s: Span = 0


class Cut(Record):
    """A connection that ends after this many bytes of the body, and always before the last byte."""

    kind: Literal["cut"]
    after_bytes: int = Field(default=0, ge=0)


class NoEnd(Record):
    """A stream without an end: closed in order, held open in silence, or continued with text without limit. A reply
    without streaming is held.
    """

    kind: Literal["no_end"]
    then: Literal["close", "hold", "go_on"] = "close"


class Shape(Record):
    """A response with status 200 that is not a chat completion."""

    kind: Literal["shape"]
    shape: Literal["no_choices", "empty_choices", "html", "truncated_json", "not_json", "empty", "told_error"]


Fault = Annotated[Status | Delay | Cut | NoEnd | Shape, Field(discriminator="kind")]


class FaultLine(Record):
    """A fault and its frequency.

    `probability`: drawn by the seed. `first`: the first requests of each conversation (or `per` step, or of the
    server). `during_s`: a period since the server's first request. Without these fields the fault always applies. If
    several faults apply, delays add up and the first of the other faults is used.
    """

    kind: Literal["fault"]
    when: When = When()
    fault: Fault
    probability: float | None = Field(default=None, ge=0, le=1)
    first: int | None = Field(default=None, ge=1)
    per: Literal["conversation", "step", "server"] = "conversation"
    during_s: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]] | None = None

    @model_validator(mode="after")
    def _has_one_measure(self) -> "FaultLine":
        if sum(measure is not None for measure in (self.probability, self.first, self.during_s)) > 1:
            raise ValueError(
                "probability, first and during_s exclude each other: keep one of them, write a second line for another"
            )
        if self.per != "conversation" and self.first is None:
            raise ValueError("per goes with first: add first, or take it out")
        return self


Line = Annotated[Server | Rule | FaultLine, Field(discriminator="kind")]
_LINE: TypeAdapter[Server | Rule | FaultLine] = TypeAdapter(Line)


class Script(Record):
    """A script, with its lines in order."""

    server: Server = Server(kind="server")
    rules: tuple[Rule, ...] = ()
    faults: tuple[FaultLine, ...] = ()


def load_script(path: Path, *, needs_rules: bool = True) -> Script:
    """Return the script in a file. Raises BadScript with a sentence for each invalid line, and for a file that cannot
    be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadScript(f"{path} cannot be read ({error}): name a script of JSON lines, as {_GUIDE} tells") from None
    return parse_script(text, path.name, needs_rules=needs_rules)


def parse_script(text: str, name: str = "script", *, needs_rules: bool = True) -> Script:
    """Return the parsed script. Empty lines and lines that begin with # are skipped. `needs_rules`: False when the
    replies come from another source. Raises BadScript.
    """
    lines: list[Server | Rule | FaultLine] = []
    wrong: list[str] = []
    # Not splitlines, which also splits at characters that JSON allows within a text.
    for number, raw in enumerate(text.split("\n"), 1):
        if not raw.strip() or raw.lstrip().startswith("#"):
            continue
        try:
            # Pydantic would silently accept a key that appears twice and use its last value. So the JSON is parsed
            # first.
            lines.append(_LINE.validate_python(_parse_json(raw)))
        except ValidationError as error:
            wrong += [f"{name}:{number}: {item}" for item in _tell(error)]
        except ValueError as error:
            wrong.append(f"{name}:{number}: {error}")
    servers = [line for line in lines if isinstance(line, Server)]
    if len(servers) > 1:
        wrong.append(f"{name}: {len(servers)} lines of kind server: make one of them")
    if needs_rules and not wrong and not any(isinstance(line, Rule) for line in lines):
        wrong.append(
            f'{name}: no line of kind rule, so no request has a reply: add one, the least is {{"kind": "rule", '
            '"reply": {"text": "ok"}}'
        )
    if wrong:
        more = f"\nand {len(wrong) - MAX_SHOWN} more" if len(wrong) > MAX_SHOWN else ""
        raise BadScript("\n".join(wrong[:MAX_SHOWN]) + more)
    rules, faults = (tuple(line for line in lines if isinstance(line, kind)) for kind in (Rule, FaultLine))
    return Script(server=servers[0] if servers else Server(kind="server"), rules=rules, faults=faults)


def _parse_json(raw: str) -> Any:
    try:
        return json.loads(raw, object_pairs_hook=_unique, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"column {error.colno}: not JSON ({error.msg}): write one JSON object a line") from None
    except RecursionError:
        raise ValueError("nested too deep: no line needs that, make it flat") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice: keep one of them")
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON: write a number")


def _tell(error: ValidationError) -> Iterator[str]:
    for fault in error.errors(include_url=False):
        place = ".".join(str(part) for part in fault["loc"] if part not in ("server", "rule"))
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            message = "there is no such field: correct its name or take it out"
        elif fault["type"] == "missing":
            message = "is missing: add it"
        elif fault["type"] == "union_tag_not_found":
            message = 'the field "kind" is missing: add server, rule or fault, or in a fault what kind it is'
        elif fault["type"] != "value_error":
            message = f"{message}: correct it as {_GUIDE} tells"
        yield f"{place}: {message}" if place else message
