"""A simple reference parser of the tag grammar: reads the whole text at once and searches back and forth. Slow, only
for comparison.
"""

import re

from toolcrew.orchestrator.dialects.tag_events import MalformedTag, TagCall, TagEvent, Text
from toolcrew.orchestrator.dialects.tag_grammar import JSON_BODY, NOT_CLOSED, STRAY_TEXT, UNQUOTED, WRONG_CLOSE
from toolcrew.orchestrator.dialects.tag_values import decode_attribute, decode_entities, strip_body

_S = r"[ \t\r\n]*"
_N = r"""[^ \t\r\n/>=<"'!?&]"""
_MARKER = re.compile(r"<tool_action(?=[ \t\r\n>/])")
_ATTRIBUTE = re.compile(rf"""[ \t\r\n]+({_N}+){_S}={_S}(?:"([^"<\r\n]*)"|'([^'<\r\n]*)')""")
# What the text may end in the midst of, before the commit point.
_HEADER_SO_FAR = re.compile(rf"""(?:{_S}/?|[ \t\r\n]+{_N}+{_S}(?:={_S}(?:"[^"<\r\n]*|'[^'<\r\n]*)?)?)\Z""")
_CHILD = re.compile(rf"<({_N}+)")
_SKIP_END = re.compile(rf"(</tool_action{_S}>)|<tool_action(?=[ \t\r\n>/])")
_CDATA = re.compile(rf"{_S}<!\[CDATA\[(.*?)\]\]>", re.DOTALL)


class _Stop(Exception):
    """The end of a tag. `kind` is `mention`, `unclosed`, `reopen`, `complete`, or a reason to skip on from `at`."""

    def __init__(self, kind: str, at: int) -> None:
        super().__init__(kind)
        self.kind = kind
        self.at = at


def read_whole(text: str) -> list[TagEvent]:
    events: list[TagEvent] = []
    start = search = 0
    if text.startswith("<think>"):
        search = text.find("</think>") + 8 if "</think>" in text else len(text)
    while (found := _MARKER.search(text, search)) is not None:
        event, end = _Tag(text, found.start(), found.end()).read()
        if event is None:
            search = found.start() + 1
            continue
        if found.start() > start:
            events.append(Text(text[start : found.start()]))
        events.append(event)
        start = search = end
    return [*events, Text(text[start:])] if start < len(text) else events


class _Tag:
    def __init__(self, text: str, start: int, at: int) -> None:
        self.text = text
        self.start = start
        self.at = at
        self.name: str | None = None
        self.problem = ""
        self.values: dict[str, str] = {}

    def read(self) -> tuple[TagEvent | None, int]:
        try:
            self._header()
            while True:
                self._child()
        except _Stop as stop:
            return self._event(stop)

    def _event(self, stop: _Stop) -> tuple[TagEvent | None, int]:
        kind, end = stop.kind, stop.at
        if kind == "mention":
            return None, 0
        if kind == "complete":
            raw = self.text[self.start : end]
            reason = self.problem or ("" if self.name else "missing tool name")
            return (
                MalformedTag(reason, self.name or None, raw) if reason else TagCall(self.name or "", self.values, raw)
            ), end
        reason = "unclosed" if kind in ("unclosed", "reopen") else self.problem or kind
        if kind == "unclosed":
            end = len(self.text)
        elif kind != "reopen":
            found = _SKIP_END.search(self.text, end)
            end = len(self.text) if found is None else found.end() if found[1] else found.start()
        return MalformedTag(reason, self.name or None, self.text[self.start : end]), end

    def _take(self, pattern: str) -> re.Match[str] | None:
        found = re.compile(pattern).match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def _need(self, literal: str, reason: str) -> None:
        """Require the literal at this position. Otherwise the text ends within the literal, or the tag is broken for
        the given reason.
        """
        if self.text.startswith(literal, self.at):
            self.at += len(literal)
            return
        raise _Stop("unclosed" if literal.startswith(self.text[self.at :]) else reason, self.at)

    def _header(self) -> None:
        count = 0
        while (found := _ATTRIBUTE.match(self.text, self.at)) is not None:
            self.at, count = found.end(), count + 1
            if found[1] == "name":
                self.problem = "duplicate attribute 'name'" if self.name is not None else self.problem
                self.name = decode_entities(found[2] if found[2] is not None else found[3])
        if self._take(rf"{_S}/>"):
            raise _Stop("complete" if count else "mention", self.at)
        if not self._take(rf"{_S}>"):
            raise _Stop("unclosed" if _HEADER_SO_FAR.match(self.text, self.at) else "mention", self.at)
        self._take(_S)
        following = self.text[self.at : self.at + 2]
        if following.startswith("{"):
            raise _Stop(JSON_BODY, self.at)
        if following not in ("", "<") and not re.match(rf"<(?:[/!]|{_N})", following):
            raise _Stop("mention", self.at)

    def _child(self) -> None:
        self._take(_S)
        start = self.at
        self._need("<", STRAY_TEXT)
        following = self.text[self.at : self.at + 1]
        if following == "!":
            self._need("!--", STRAY_TEXT)
            self._end_of(self.text.find("-->", self.at), 3)
        elif following == "/":
            self._need("/", STRAY_TEXT)
            self._close()
        else:
            name = self._take(rf"{_N}+")
            if name is None:
                raise _Stop(STRAY_TEXT if following else "unclosed", self.at)
            if _MARKER.match(self.text, start):
                raise _Stop("reopen", start)
            self._parameter(name[0])

    def _end_of(self, found: int, length: int) -> None:
        if found < 0:
            raise _Stop("unclosed", self.at)
        self.at = found + length

    def _close(self) -> None:
        found = self._take(f"{_N}*")
        if self.at == len(self.text):
            raise _Stop("unclosed", self.at)
        if found is None or found[0] != "tool_action":
            raise _Stop(WRONG_CLOSE, self.at)
        self._take(_S)
        self._need(">", WRONG_CLOSE)
        raise _Stop("complete", self.at)

    def _parameter(self, name: str) -> None:
        has_blank = self._take(r"[ \t\r\n]+") is not None
        if self._take("/"):
            self._need(">", NOT_CLOSED)
            self._keep(name, "")
        elif self._take(">"):
            self._keep(name, self._paired(name))
        elif has_blank and (attribute := self._take(f"{_N}+")) is not None and self.at < len(self.text):
            if attribute[0] != "value":
                raise _Stop(f"unexpected attribute '{attribute[0]}'", self.at)
            self._take(_S)
            self._need("=", UNQUOTED)
            self._take(_S)
            quote = self.text[self.at : self.at + 1]
            if quote not in ("'", '"'):
                raise _Stop(UNQUOTED if quote else "unclosed", self.at)
            self.at += 1
            self._keep(name, decode_attribute(self._value(name, quote), quote))
        else:
            raise _Stop(NOT_CLOSED if self.at < len(self.text) else "unclosed", self.at)

    def _keep(self, name: str, value: str) -> None:
        if name in self.values:
            self.problem = self.problem or f"duplicate parameter '{name}'"
        self.values[name] = value

    def _value(self, name: str, quote: str) -> str:
        start = self.at
        while True:
            self._end_of(self.text.find(quote, self.at), 1)
            end = self.at - 1
            if self._take(f"{_S}/>"):
                return self.text[start:end]
            if self._take(f"{_S}>"):
                self._take(_S)
                self._need("</", NOT_CLOSED)
                if self._take(rf"{re.escape(name)}(?!{_N})") is None:
                    raise _Stop("unclosed" if re.match(rf"{_N}*\Z", self.text[self.at :]) else NOT_CLOSED, self.at - 2)
                self._take(_S)
                self._need(">", NOT_CLOSED)
                return self.text[start:end]
            attribute = re.compile(rf"[ \t\r\n]+({_N}+){_S}={_S}[\"']").match(self.text, self.at)
            if attribute is not None:
                raise _Stop(f"unexpected attribute '{attribute[1]}'", attribute.end())

    def _paired(self, name: str) -> str:
        start, sections = self.at, []
        while (section := _CDATA.match(self.text, self.at)) is not None:
            sections.append(section[1])
            self.at = section.end()
        if re.compile(rf"{_S}<!\[CDATA\[").match(self.text, self.at):
            raise _Stop("unclosed", self.at)
        closing = re.compile(rf"</{re.escape(name)}(?!{_N}){_S}>(?={_S}(?:<(?:!--|{_N}|/tool_action(?!{_N}))))")
        bare = re.compile(_S).match(self.text, self.at)
        found = closing.search(self.text, self.at)
        if found is None:
            raise _Stop("unclosed", self.at)
        self.at = found.end()
        if sections and bare is not None and bare.end() == found.start():
            return "".join(sections)
        return strip_body(self.text[start : found.start()])
