"""Generate strings of a GBNF grammar. The supported notation is the one that the product uses: literals, character
classes, groups, `|`, `?`, `*`, `{m,n}` and rules.
"""

import re
from collections.abc import Callable
from random import Random
from typing import Any

Node = tuple[Any, ...]

_TOKEN = re.compile(r'\s+|("(?:[^"\\]|\\.)*")|(\[(?:[^\]\\]|\\.)*\])|([A-Za-z][A-Za-z0-9-]*)|(\{\d+,\d+\})|([()|*?])')
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_PLAIN = {"n": "\n", "r": "\r", "t": "\t"}
_INTERESTING = "abc <>/&\"'!?=[]-\n\t;\\é名"
MAX_DEPTH = 24


class Grammar:
    """A parsed grammar. `sample` generates one string of a rule."""

    def __init__(self, text: str) -> None:
        self._rules = {}
        for line in text.splitlines():
            name, _, rule = line.partition(" ::= ")
            self._rules[name] = _Parser(rule).parse()

    def sample(self, random: Random, rule: str, depth: int = 0) -> str:
        return self._sample(random, self._rules[rule], depth)

    def _sample(self, random: Random, node: Node, depth: int) -> str:
        kind = node[0]
        if kind == "text":
            return str(node[1])
        if kind == "class":
            return str(node[1](random))
        if kind == "rule":
            return self.sample(random, node[1], depth + 1)
        if kind == "all":
            return "".join(self._sample(random, part, depth) for part in node[1])
        if kind == "any":
            # At a great depth the last alternative is used, because recursive rules end with a flat alternative.
            choice = node[1][-1] if depth > MAX_DEPTH else random.choice(node[1])
            return self._sample(random, choice, depth)
        low, high = node[2], node[3]
        count = low if depth > MAX_DEPTH else random.randint(low, min(high, low + 8))
        return "".join(self._sample(random, node[1], depth) for _ in range(count))


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = []
        position = 0
        while position < len(text):
            found = _TOKEN.match(text, position)
            if found is None:
                raise ValueError(f"no GBNF at {text[position : position + 20]!r}")
            position = found.end()
            if found[0].strip():
                self._tokens.append(found[0])

    def parse(self) -> Node:
        node = self._alternatives()
        if self._tokens:
            raise ValueError(f"left over: {self._tokens[:3]}")
        return node

    def _alternatives(self) -> Node:
        options = [self._sequence()]
        while self._tokens[:1] == ["|"]:
            self._tokens.pop(0)
            options.append(self._sequence())
        return options[0] if len(options) == 1 else ("any", options)

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._tokens and self._tokens[0] not in ("|", ")"):
            part = self._atom(self._tokens.pop(0))
            while self._tokens and (bounds := _bounds(self._tokens[0])) is not None:
                self._tokens.pop(0)
                part = ("repeat", part, *bounds)
            parts.append(part)
        return ("all", parts)

    def _atom(self, token: str) -> Node:
        if token.startswith('"'):
            return ("text", _unescape(token[1:-1]))
        if token.startswith("["):
            return ("class", _characters(token[1:-1]))
        if token == "(":
            node = self._alternatives()
            assert self._tokens.pop(0) == ")"
            return node
        return ("rule", token)


def _bounds(token: str) -> tuple[int, int] | None:
    if token in ("?", "*"):
        return (0, 1) if token == "?" else (0, 1000)
    if not token.startswith("{"):
        return None
    low, high = token[1:-1].split(",")
    return int(low), int(high)


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else _PLAIN.get(found[2], found[2]), text)


def _characters(inside: str) -> Callable[[Random], str]:
    """Return a function that draws a character of a class. A negated class mostly gives characters that have a
    meaning in a tag.
    """
    is_negated = inside.startswith("^")
    parts = re.findall(r"(\\x[0-9a-fA-F]{2}|\\.|[^\\])(?:-(\\x[0-9a-fA-F]{2}|\\.|[^\\]))?", inside.removeprefix("^"))
    ranges = [(_unescape(first), _unescape(last or first)) for first, last in parts]
    named = [chr(code) for first, last in ranges for code in range(ord(first), ord(last) + 1)]
    if not is_negated:
        return lambda random: random.choice(named)
    common = [character for character in _INTERESTING if character not in named]

    def draw(random: Random) -> str:
        rare = chr(random.choice((random.randrange(0x20, 0x3000), random.randrange(0xE000, 0x110000))))
        return rare if random.random() < 0.1 and rare not in named else random.choice(common)

    return draw
