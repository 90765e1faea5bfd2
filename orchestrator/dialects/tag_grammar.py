"""The grammar of an open `<tool_action` tag as a table of states.

A state skips the longest match of its pattern `run`, reads one character and follows the edge for that character. An
edge with step 0 does not consume: the next state sees the character again. Therefore no text is searched twice, however
it was split into chunks.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

MARKER = "<tool_action"
TAG = "tool_action"
BLANKS = " \t\r\n"
DELIMITERS = frozenset(BLANKS + "/>=<\"'!?&")
"""Characters that end the name of a tag or of an attribute."""

JSON_BODY = 'the body is JSON; write <tool_action name="TOOL"><PARAMETER value="..." /></tool_action>'
STRAY_TEXT = "unexpected text between parameters"
NOT_CLOSED = "parameter tag is not self-closed"
UNQUOTED = "unquoted parameter value"
WRONG_CLOSE = "unexpected closing tag"

Skip = Callable[[str, int, int], "re.Match[str] | None"]


class Edge(NamedTuple):
    """A transition. `step` is the number of characters consumed, 0 or 1.

    `action` is a method of the open tag that records a position or selects another target.
    """

    target: str
    step: int
    action: str | None = None
    reason: str | None = None


@dataclass
class State:
    """A state of an open tag. It skips the pattern `run`. Then it follows the edge in `edges` for the next character,
    `name_edge` for a character of a name, or `otherwise`.
    """

    run: Skip
    edges: dict[str, Edge]
    otherwise: Edge
    name_edge: Edge | None = None
    is_header: bool = False
    """True before the commit point, the character from which on the text is certainly a call. Before it, the text may
    only mention the tag.
    """
    awaited: str = ">"
    """Character that must come, then a `>`, before a tag can begin or end."""


def _run(characters: str) -> Skip:
    return re.compile(f"[{characters}]*").match


_NOTHING = re.compile("").match
_S = r" \t\r\n"
_DELIMITERS = _S + r"""/>=<"'!?&"""
_SPACE = _run(_S)
_NAME = _run(f"^{_DELIMITERS}")

# Shortcuts for whole canonical parts in one chunk. The states would read the same text with the same result.
HEADER = re.compile(rf'[{_S}]++name="([^"<>&\r\n]*+)">').match
_COMMON_CHILD = rf'[{_S}]*+<([^{_DELIMITERS}]++)[{_S}]++value="([^"]*+)"[{_S}]*+/>'
CHILD = re.compile(_COMMON_CHILD).match
COMMIT = re.compile(rf"[{_S}]*+<(?:[/!]|[^{_DELIMITERS}])").match
CLOSE = re.compile(rf"[{_S}]*+</{TAG}[{_S}]*+>").match
# In order: the children of a call in the common form, the whole call, the start of one, and text that resembles one
# only up to its first attribute.
_COMMON_HEADER = rf'{MARKER}[{_S}]++name="([^"<>&\r\n]++)">'
_ANY_CHILD = _COMMON_CHILD.replace("([", "(?:[")
COMMON_CHILDREN = re.compile(_COMMON_CHILD).findall
COMMON_CALL = re.compile(rf"{_COMMON_HEADER}((?:{_ANY_CHILD})*+)[{_S}]*+</{TAG}[{_S}]*+>").match
COMMON_START = re.compile(
    rf"{MARKER}[{_S}]++(?:[^{_DELIMITERS}]++[{_S}]*+(?:=[{_S}]*+(?:\"[^\"<>&\r\n]*+(?:\"(?:>"
    rf"(?:{_ANY_CHILD})*+[{_S}]*+(?:<(?:([/!]|[^{_DELIMITERS}])[^<>\"]*+(?:\"[^\"]*+)?)?)?)?)?)?)?)?"
).fullmatch
"""Pattern of the common start of a call. Group 1 matches if the text is past the commit point."""
MENTION = re.compile(rf"{MARKER}[{_S}]++[^{_DELIMITERS}]++[{_S}]*+[^={_S}]").match


def _value_run(quote: str) -> Skip:
    """Return the pattern for the text of a value. It includes quotes that are certainly data, because no `/>`, `>` or
    attribute follows them.
    """
    blank, name = f"[{_S}]", f"[^{_DELIMITERS}]"
    data = rf"""[^{_S}/>]|{blank}*+/[^>]|{blank}++[=<"'!?&]|{blank}++{name}++(?:[^{_S}=]|{blank}++[^{_S}=])"""
    return re.compile(rf"(?:[^{quote}]++|{quote}(?={data}))*+").match


def _to(target: str, action: str | None = None) -> Edge:
    return Edge(target, 1, action)


def _peek(target: str, action: str | None = None) -> Edge:
    return Edge(target, 0, action)


def _fail(reason: str, target: str = "skip") -> Edge:
    return Edge(target, 0, "fail", reason)


_MENTION = Edge("", 0, "mention")


def _blank(target: str, action: str | None = None) -> dict[str, Edge]:
    return {character: _to(target, action) for character in BLANKS}


def _quotes(double: Edge, single: Edge) -> dict[str, Edge]:
    return {'"': double, "'": single}


def _header_states() -> dict[str, State]:
    """Return the states from the marker `<tool_action` to the first character of the tag's body. A violation here means
    that the text only mentions a tag, so it stays text and is not a call.
    """
    ends = {">": _to("body"), "/": _to("header_slash")}
    return {
        "header": State(_SPACE, ends, _MENTION, name_edge=_to("header_name", "mark")),
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
        "body_open": _child_open_state(_MENTION),
    }


def _child_open_state(otherwise: Edge) -> State:
    """Return the state after a `<` where a child, a comment or the tag's end may follow."""
    return State(
        _NOTHING, {"/": _to("close", "mark_next"), "!": _to("bang")}, otherwise, name_edge=_to("child", "mark")
    )


def _child_states() -> dict[str, State]:
    """Return the states between the parameters (child tags), and those in a child tag up to its value."""
    ends = {">": _to("paired", "begin_paired"), "/": _to("child_slash")}
    return {
        "gap": State(_SPACE, {"<": _to("gap_open", "open")}, _fail(STRAY_TEXT)),
        "gap_open": _child_open_state(_fail(STRAY_TEXT)),
        "bang": State(_NOTHING, {"-": _to("bang_dash")}, _fail(STRAY_TEXT)),
        "bang_dash": State(_NOTHING, {"-": _to("comment")}, _fail(STRAY_TEXT)),
        "comment": State(_run("^-"), {"-": _to("comment_dash")}, _peek("comment"), awaited="-"),
        "comment_dash": State(_NOTHING, {"-": _to("comment_dashes")}, _peek("comment")),
        "comment_dashes": State(_run("-"), {">": _to("gap")}, _peek("comment")),
        "close": State(_NAME, {}, _peek("", "close_name")),
        "close_end": State(_SPACE, {">": _to("", "complete")}, _fail(WRONG_CLOSE)),
        "child": State(_NAME, {}, _peek("", "child_name")),
        "child_tight": State(_NOTHING, {**_blank("child_gap"), **ends}, _fail(NOT_CLOSED)),
        "child_gap": State(_SPACE, ends, _fail(NOT_CLOSED), name_edge=_to("attribute", "mark")),
        "child_slash": State(_NOTHING, {">": _to("gap", "empty_value")}, _fail(NOT_CLOSED)),
        "attribute": State(_NAME, {}, _peek("", "value_attribute")),
        "equals": State(_SPACE, {"=": _to("quote")}, _fail(UNQUOTED)),
        "quote": State(_SPACE, _quotes(_to('value"', "begin_value"), _to("value'", "begin_value")), _fail(UNQUOTED)),
    }


def _value_states(quote: str) -> dict[str, State]:
    """Return the states of a quoted value. A quote ends it only if the end of the child seems to follow; otherwise it
    is data.
    """

    def state(name: str) -> str:
        return name + quote

    data = _peek(state("value"))
    ends = {"/": _to(state("slash")), ">": _to("paired_value")}
    attribute = Edge("skip", 0, "second_attribute")
    return {
        state("value"): State(_value_run(quote), {quote: _to(state("after"), "end_value")}, data, awaited=quote),
        state("after"): State(_NOTHING, {**ends, **_blank(state("spaced"))}, data),
        state("spaced"): State(_SPACE, ends, data, name_edge=_to(state("word"), "mark")),
        state("slash"): State(_NOTHING, {">": _to("gap", "store_value")}, data),
        state("word"): State(
            _NAME, {"=": _to(state("word_quote"), "attribute"), **_blank(state("word_equals"), "attribute")}, data
        ),
        state("word_equals"): State(_SPACE, {"=": _to(state("word_quote"))}, data),
        state("word_quote"): State(_SPACE, _quotes(attribute, attribute), data),
    }


def _paired_value_states() -> dict[str, State]:
    """Return the states of `value="..."></name>`, the only form in which `>` may replace `/>`."""
    return {
        "paired_value": State(_SPACE, {"<": _to("paired_value_open", "open")}, _fail(NOT_CLOSED)),
        "paired_value_open": State(
            _NOTHING, {"/": _to("paired_value_close", "mark_next")}, _fail(NOT_CLOSED, "skip_open")
        ),
        "paired_value_close": State(_NAME, {}, _peek("", "paired_value_name")),
        "paired_value_end": State(_SPACE, {">": _to("gap", "store_value")}, _fail(NOT_CLOSED)),
    }


def _paired_states() -> dict[str, State]:
    """Return the states of a literal body, or of CDATA sections only.

    `</name>` ends the body only if a child, a comment or the tag's end follows.
    """
    literal = _peek("literal", "literal")
    states = {
        "paired": State(_SPACE, {"<": _to("paired_open", "open")}, literal),
        "paired_open": State(_NOTHING, {"/": _to("end_name", "mark_next"), "!": _to("cdata0")}, literal),
        "literal": State(
            re.compile("(?:[^<]++|<(?=[^/]))*+").match,
            {"<": _to("literal_open", "open")},
            _peek("literal"),
            awaited="<",
        ),
        "literal_open": State(_NOTHING, {"/": _to("end_name", "mark_next")}, _peek("literal")),
        "end_name": State(_NAME, {}, _peek("", "end_name")),
        "end_close": State(_SPACE, {">": _to("follow", "end_paired")}, literal),
        "follow": State(_SPACE, {"<": _to("follow_open", "open")}, literal),
        "follow_open": State(
            _NOTHING,
            {"/": _to("follow_close", "mark_next"), "!": _to("follow_bang")},
            literal,
            name_edge=_to("child", "store_paired_child"),
        ),
        "follow_close": State(_NAME, {}, _peek("", "follow_name")),
        "follow_bang": State(_NOTHING, {"-": _to("follow_dash")}, literal),
        "follow_dash": State(_NOTHING, {"-": _to("comment", "store_paired")}, literal),
        "cdata": State(_run(r"^\]"), {"]": _to("cdata_bracket")}, _peek("cdata"), awaited="]"),
        "cdata_bracket": State(_NOTHING, {"]": _to("cdata_brackets")}, _peek("cdata")),
        "cdata_brackets": State(_run(r"\]"), {">": _to("paired", "end_cdata")}, _peek("cdata")),
    }
    opening = "[CDATA["
    for position, character in enumerate(opening):
        last = position == len(opening) - 1
        edge = _to("cdata", "begin_cdata") if last else _to(f"cdata{position + 1}")
        states[f"cdata{position}"] = State(_NOTHING, {character: edge}, literal)
    return states


def _skip_states() -> dict[str, State]:
    """Return the states after an error, which skip to the tag's end or to the next tag."""
    reopen = {character: _peek("", "reopen_skipped") for character in BLANKS + ">/"}
    return {
        "skip": State(
            re.compile("(?:[^<]++|<(?=[^/t]))*+").match, {"<": _to("skip_open", "open")}, _peek("skip"), awaited="<"
        ),
        "skip_open": State(
            _NOTHING, {"/": _to("skip_close", "mark_next")}, _peek("skip"), name_edge=_to("skip_name", "mark")
        ),
        "skip_close": State(_NAME, {}, _peek("", "skip_close_name")),
        "skip_end": State(_SPACE, {">": _to("", "complete")}, _peek("skip")),
        "skip_name": State(_NAME, reopen, _peek("skip")),
    }


def _as_header(states: dict[str, State]) -> dict[str, State]:
    return {name: replace(state, is_header=True) for name, state in states.items()}


STATES = {
    **_as_header(_header_states()),
    **_child_states(),
    **_value_states('"'),
    **_value_states("'"),
    **_paired_value_states(),
    **_paired_states(),
    **_skip_states(),
}
