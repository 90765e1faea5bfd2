"""The grammar of an open `<tool_action` tag as a table of states: what to skip, and where each next character leads.

A state skips its run, looks at one character and takes the edge for it. Edges that only look do not consume: the next
state sees the character again. So no text is ever searched twice, however it was cut into chunks.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

MARKER = "<tool_action"
TAG = "tool_action"
BLANKS = " \t\r\n"
DELIMITERS = frozenset(BLANKS + "/>=<\"'!?&")
"""What ends a name."""

JSON_BODY = 'the body is JSON; write <tool_action name="TOOL"><PARAMETER value="..." /></tool_action>'
STRAY_TEXT = "unexpected text between parameters"
NOT_CLOSED = "parameter tag is not self-closed"
UNQUOTED = "unquoted parameter value"
WRONG_CLOSE = "unexpected closing tag"

Skip = Callable[[str, int, int], "re.Match[str] | None"]


class Edge(NamedTuple):
    """`step`: characters consumed, 0 or 1. `action`: a method of the open tag that notes a place, or picks another
    target.
    """

    target: str
    step: int
    action: str | None = None
    reason: str | None = None


@dataclass
class State:
    """`run` is skipped first; then `edges` by character, `named` for any character of a name, `otherwise` for the
    rest.
    """

    run: Skip
    edges: dict[str, Edge]
    otherwise: Edge
    named: Edge | None = None
    is_header: bool = False
    """Before the commit point: the next character may still show that all this was a mention."""
    awaited: str = ">"
    """No tag ends or begins before this character comes (and after it a `>`)."""


def _run(characters: str) -> Skip:
    return re.compile(f"[{characters}]*").match


_NOTHING = re.compile("").match
_S = r" \t\r\n"
_DELIMITERS = _S + r"""/>=<"'!?&"""
_SPACE = _run(_S)
_NAME = _run(f"^{_DELIMITERS}")

# Shortcuts: whole canonical parts that lie in one chunk. What they match, the states would read alike.
HEADER = re.compile(rf'[{_S}]++name="([^"<>&\r\n]*+)">').match
_COMMON_CHILD = rf'[{_S}]*+<([^{_DELIMITERS}]++)[{_S}]++value="([^"]*+)"[{_S}]*+/>'
CHILD = re.compile(_COMMON_CHILD).match
COMMIT = re.compile(rf"[{_S}]*+<(?:[/!]|[^{_DELIMITERS}])").match
CLOSE = re.compile(rf"[{_S}]*+</{TAG}[{_S}]*+>").match
# A whole call in the common form, its children, what may still become one, and what looks like one up to its first
# attribute only.
_COMMON_HEADER = rf'{MARKER}[{_S}]++name="([^"<>&\r\n]++)">'
_ANY_CHILD = _COMMON_CHILD.replace("([", "(?:[")
COMMON_CHILDREN = re.compile(_COMMON_CHILD).findall
COMMON_CALL = re.compile(rf"{_COMMON_HEADER}((?:{_ANY_CHILD})*+)[{_S}]*+</{TAG}[{_S}]*+>").match
COMMON_START = re.compile(
    rf"{MARKER}[{_S}]++(?:[^{_DELIMITERS}]++[{_S}]*+(?:=[{_S}]*+(?:\"[^\"<>&\r\n]*+(?:\"(?:>"
    rf"(?:{_ANY_CHILD})*+[{_S}]*+(?:<(?:([/!]|[^{_DELIMITERS}])[^<>\"]*+(?:\"[^\"]*+)?)?)?)?)?)?)?)?"
).fullmatch
"""Its first group matches only behind the commit point."""
MENTION = re.compile(rf"{MARKER}[{_S}]++[^{_DELIMITERS}]++[{_S}]*+[^={_S}]").match


def _value_run(quote: str) -> Skip:
    """Value text, with those quotes that are plainly data: no `/>`, `>` or attribute can follow."""
    blank, name = f"[{_S}]", f"[^{_DELIMITERS}]"
    data = rf"""[^{_S}/>]|{blank}*+/[^>]|{blank}++[=<"'!?&]|{blank}++{name}++(?:[^{_S}=]|{blank}++[^{_S}=])"""
    return re.compile(rf"(?:[^{quote}]++|{quote}(?={data}))*+").match


def _to(target: str, action: str | None = None) -> Edge:
    return Edge(target, 1, action)


def _see(target: str, action: str | None = None) -> Edge:
    return Edge(target, 0, action)


def _fail(reason: str, target: str = "skip") -> Edge:
    return Edge(target, 0, "fail", reason)


_MENTION = Edge("", 0, "mention")


def _blank(target: str, action: str | None = None) -> dict[str, Edge]:
    return {character: _to(target, action) for character in BLANKS}


def _quotes(double: Edge, single: Edge) -> dict[str, Edge]:
    return {'"': double, "'": single}


def _header() -> dict[str, State]:
    """From the marker to the first sign of a body. What breaks the rules here is a mention of the tag, given back as
    text.
    """
    ends = {">": _to("body"), "/": _to("header_slash")}
    return {
        "header": State(_SPACE, ends, _MENTION, named=_to("header_name", "mark")),
        "header_tight": State(_NOTHING, {**_blank("header"), **ends}, _MENTION),
        "header_slash": State(_NOTHING, {">": _to("", "self_closed")}, _MENTION),
        "header_name": State(
            _NAME, {**_blank("header_equals", "attribute"), "=": _to("header_quote", "attribute")}, _MENTION
        ),
        "header_equals": State(_SPACE, {"=": _to("header_quote")}, _MENTION),
        "header_quote": State(
            _SPACE, _quotes(_to("header_double", "mark_next"), _to("header_single", "mark_next")), _MENTION
        ),
        "header_double": State(_run(r'^"<\r\n'), {'"': _to("header_tight", "attribute_value")}, _MENTION),
        "header_single": State(_run(r"^'<\r\n"), {"'": _to("header_tight", "attribute_value")}, _MENTION),
        "body": State(_SPACE, {"<": _to("body_open", "open"), "{": _fail(JSON_BODY)}, _MENTION),
        "body_open": _child_open(_MENTION),
    }


def _child_open(otherwise: Edge) -> State:
    """Behind a `<` where a child, a comment or the tag's end may stand."""
    return State(_NOTHING, {"/": _to("close", "mark_next"), "!": _to("bang")}, otherwise, named=_to("child", "mark"))


def _children() -> dict[str, State]:
    """Between the children, and a child's tag up to its value."""
    ends = {">": _to("paired", "begin_paired"), "/": _to("child_slash")}
    return {
        "gap": State(_SPACE, {"<": _to("gap_open", "open")}, _fail(STRAY_TEXT)),
        "gap_open": _child_open(_fail(STRAY_TEXT)),
        "bang": State(_NOTHING, {"-": _to("bang_dash")}, _fail(STRAY_TEXT)),
        "bang_dash": State(_NOTHING, {"-": _to("comment")}, _fail(STRAY_TEXT)),
        "comment": State(_run("^-"), {"-": _to("comment_dash")}, _see("comment"), awaited="-"),
        "comment_dash": State(_NOTHING, {"-": _to("comment_dashes")}, _see("comment")),
        "comment_dashes": State(_run("-"), {">": _to("gap")}, _see("comment")),
        "close": State(_NAME, {}, _see("", "close_name")),
        "close_end": State(_SPACE, {">": _to("", "complete")}, _fail(WRONG_CLOSE)),
        "child": State(_NAME, {}, _see("", "child_name")),
        "child_tight": State(_NOTHING, {**_blank("child_gap"), **ends}, _fail(NOT_CLOSED)),
        "child_gap": State(_SPACE, ends, _fail(NOT_CLOSED), named=_to("attribute", "mark")),
        "child_slash": State(_NOTHING, {">": _to("gap", "empty_value")}, _fail(NOT_CLOSED)),
        "attribute": State(_NAME, {}, _see("", "value_attribute")),
        "equals": State(_SPACE, {"=": _to("quote")}, _fail(UNQUOTED)),
        "quote": State(_SPACE, _quotes(_to('value"', "begin_value"), _to("value'", "begin_value")), _fail(UNQUOTED)),
    }


def _value(quote: str) -> dict[str, State]:
    """A quoted value. A quote ends it only when what follows looks like the end of the child; else it was data."""

    def state(name: str) -> str:
        return name + quote

    data = _see(state("value"))
    ends = {"/": _to(state("slash")), ">": _to("paired_value")}
    attribute = Edge("skip", 0, "second_attribute")
    return {
        state("value"): State(_value_run(quote), {quote: _to(state("after"), "end_value")}, data, awaited=quote),
        state("after"): State(_NOTHING, {**ends, **_blank(state("spaced"))}, data),
        state("spaced"): State(_SPACE, ends, data, named=_to(state("word"), "mark")),
        state("slash"): State(_NOTHING, {">": _to("gap", "keep_value")}, data),
        state("word"): State(
            _NAME, {"=": _to(state("word_quote"), "attribute"), **_blank(state("word_equals"), "attribute")}, data
        ),
        state("word_equals"): State(_SPACE, {"=": _to(state("word_quote"))}, data),
        state("word_quote"): State(_SPACE, _quotes(attribute, attribute), data),
    }


def _paired_value() -> dict[str, State]:
    """`value="..."></name>`: the one thing that may follow `>` instead of `/>`."""
    return {
        "paired_value": State(_SPACE, {"<": _to("paired_value_open", "open")}, _fail(NOT_CLOSED)),
        "paired_value_open": State(
            _NOTHING, {"/": _to("paired_value_close", "mark_next")}, _fail(NOT_CLOSED, "skip_open")
        ),
        "paired_value_close": State(_NAME, {}, _see("", "paired_value_name")),
        "paired_value_end": State(_SPACE, {">": _to("gap", "keep_value")}, _fail(NOT_CLOSED)),
    }


def _paired() -> dict[str, State]:
    """A literal body, or CDATA sections alone. `</name>` ends it only when a child, a comment or the tag's end
    follows.
    """
    literal = _see("literal", "literal")
    states = {
        "paired": State(_SPACE, {"<": _to("paired_open", "open")}, literal),
        "paired_open": State(_NOTHING, {"/": _to("end_name", "mark_next"), "!": _to("cdata0")}, literal),
        "literal": State(
            re.compile("(?:[^<]++|<(?=[^/]))*+").match, {"<": _to("literal_open", "open")}, _see("literal"), awaited="<"
        ),
        "literal_open": State(_NOTHING, {"/": _to("end_name", "mark_next")}, _see("literal")),
        "end_name": State(_NAME, {}, _see("", "end_name")),
        "end_close": State(_SPACE, {">": _to("follow", "end_paired")}, literal),
        "follow": State(_SPACE, {"<": _to("follow_open", "open")}, literal),
        "follow_open": State(
            _NOTHING,
            {"/": _to("follow_close", "mark_next"), "!": _to("follow_bang")},
            literal,
            named=_to("child", "keep_paired_child"),
        ),
        "follow_close": State(_NAME, {}, _see("", "follow_name")),
        "follow_bang": State(_NOTHING, {"-": _to("follow_dash")}, literal),
        "follow_dash": State(_NOTHING, {"-": _to("comment", "keep_paired")}, literal),
        "cdata": State(_run(r"^\]"), {"]": _to("cdata_bracket")}, _see("cdata"), awaited="]"),
        "cdata_bracket": State(_NOTHING, {"]": _to("cdata_brackets")}, _see("cdata")),
        "cdata_brackets": State(_run(r"\]"), {">": _to("paired", "end_cdata")}, _see("cdata")),
    }
    opening = "[CDATA["
    for place, character in enumerate(opening):
        last = place == len(opening) - 1
        edge = _to("cdata", "begin_cdata") if last else _to(f"cdata{place + 1}")
        states[f"cdata{place}"] = State(_NOTHING, {character: edge}, literal)
    return states


def _skip() -> dict[str, State]:
    """After an error: on to the tag's end, or to the next tag."""
    reopen = {character: _see("", "reopen_skipped") for character in BLANKS + ">/"}
    return {
        "skip": State(
            re.compile("(?:[^<]++|<(?=[^/t]))*+").match, {"<": _to("skip_open", "open")}, _see("skip"), awaited="<"
        ),
        "skip_open": State(
            _NOTHING, {"/": _to("skip_close", "mark_next")}, _see("skip"), named=_to("skip_name", "mark")
        ),
        "skip_close": State(_NAME, {}, _see("", "skip_close_name")),
        "skip_end": State(_SPACE, {">": _to("", "complete")}, _see("skip")),
        "skip_name": State(_NAME, reopen, _see("skip")),
    }


def _as_header(states: dict[str, State]) -> dict[str, State]:
    return {name: replace(state, is_header=True) for name, state in states.items()}


STATES = {
    **_as_header(_header()),
    **_children(),
    **_value('"'),
    **_value("'"),
    **_paired_value(),
    **_paired(),
    **_skip(),
}
