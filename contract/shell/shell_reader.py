"""Reader that splits bash text into simple commands: quotes, expansions, here-documents and groups. It makes one pass
and never runs anything.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

MAX_LEVEL = 40
"""Limit of nested substitutions, groups and quotes."""

_PLAIN = re.compile(r"""[^ \t\n;&|()<>\\'"$`*?\[{~\x00]+""")
_QUOTED_PLAIN = re.compile(r'[^"\\$`\x00]+')
_BRACES = re.compile(r"\{[^{}]*(?:,|\.\.)")
_NAME = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_BRACED_NAME = re.compile(r"\$\{[!#]?([A-Za-z_][A-Za-z0-9_]*)")
_POSITIONAL = re.compile(r"\$(?:[@*1-9]|\{(?:[@*]|[1-9][0-9]*)\})")
_SPECIAL = re.compile(r"\$[?$!#0-]")
_ANSI_C = re.compile(
    r"\\(?:x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{1,4})|U([0-9A-Fa-f]{1,8})|([0-7]{1,3})|c(.)|(.))", re.DOTALL
)
_ANSI_C_LETTERS = {
    "a": "\a",
    "b": "\b",
    "e": "\x1b",
    "E": "\x1b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
}
_CUT_IFS = re.compile(r"\$\{IFS[^A-Za-z0-9_]")
_UNKNOWN = "$(...)"
MAX_TOKENS = 10_000
"""Limit of the words, operators and blanks of one text. Bodies of here-documents do not count."""

_OPERATOR = re.compile(r";;&|;;|;&|;|&&|&(?!>)|\|\||\|&|\|")
_REDIRECTION = re.compile(r"\d*(&>>|&>|<<<|<<-|<<|<>|<&|>>|>\||>&|<(?!\()|>(?!\())")
_BLANKS = re.compile(r"(?:[ \t]|\\\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_EMPTY_PARENTHESES = re.compile(r"\([ \t]*\)")
_KEYWORDS = frozenset(
    {"if", "then", "elif", "else", "fi", "while", "until", "do", "done", "esac", "!", "{", "}", "time", "coproc"}
)
_LOOPS = ("for", "select")


class Unreadable(Exception):
    """Raised when the text is too long or nested too deep. The message fits after a colon."""


@dataclass(frozen=True)
class Word:
    """Word of a command.

    `text`: the word without quotes; a leading unquoted `~` is written as `$HOME`. `is_expanded`: a part of the word
    is known only at run time (`$x`, `$(...)`). `is_pattern`: the word has an unquoted glob or brace list, which bash
    may replace by other words. `is_quoted`: the word had a quote or a backslash, so it is not a keyword.
    """

    text: str
    is_expanded: bool = False
    is_pattern: bool = False
    is_quoted: bool = False


@dataclass(eq=False)
class Draft:
    """Simple command while the reader reads it. `source`: the draft whose output the command reads. `heredocs`:
    bodies, which are added when their lines are read.
    """

    words: list[Word] = field(default_factory=list)
    redirects: list[tuple[str, Word]] = field(default_factory=list)
    heredocs: list[str] = field(default_factory=list)
    source: "Draft | None" = None
    operator: str = ""
    function: str = ""
    is_test: bool = False
    is_timed: bool = False

    def stdin(self) -> str | None:
        """Return the text of its last here-document or here-string; None if it has none."""
        strings = [target.text for operator, target in self.redirects if operator == "<<<"]
        inputs = [*strings, *self.heredocs]
        return inputs[-1] if inputs else None

    def starts_with(self, keyword: str) -> bool:
        # After a redirection no word is a keyword.
        return bool(self.words) and self.words[0].text == keyword and not self.words[0].is_quoted and not self.redirects


@dataclass(frozen=True)
class Reading:
    """Content of a text. `texts`: nested scripts that must be read separately. `opaque`: the first reason why the
    content is not complete.
    """

    drafts: list[Draft]
    texts: list[str]
    opaque: str


@dataclass(eq=False)
class _List:
    """List of commands, up to `closer`. `cases`: the number of open `case` commands. Inside them a `)` may end a
    pattern instead of the list.
    """

    closer: str
    draft: Draft
    cases: int = 0
    is_pattern_next: bool = False


def read_script(text: str) -> Reading:
    """Return the content of a text. Never raises: if the text is too long or nested too deep, only its beginning is
    read.
    """
    reader = _Reader(text)
    try:
        reader.read_list("")
    except Unreadable as error:
        reader.doubt(str(error))
    return Reading(reader.drafts, reader.texts, reader.opaque)


class _Reader:
    """Reader with the position `at`. `texts`: scripts in backquotes. `opaque`: the first reason why the text is not
    readable; "" if there is none.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.level = 0
        self.drafts: list[Draft] = []
        self.texts: list[str] = []
        self.opaque = ""
        self._parts: list[str] = []
        self._is_expanded = False
        self._heredocs: list[tuple[Draft, Word, bool]] = []
        self._bodies: list[str] = []
        self._pending_function = ""
        self._tokens = 0

    def read_list(self, closer: str) -> None:
        """Read commands up to and including `closer`; "" means the end of the text."""
        if self._heredocs and closer:
            self.doubt("a here-document and a substitution share a line")
        with self.descend():
            here = _List(closer, self._new_draft())
            while self.at < len(self.text):
                if self._step(here):
                    return
            self._end(here, "")
            if closer:
                self.doubt("a parenthesis is not closed")
            if self._heredocs:
                self._heredocs.clear()
                self.doubt("a here-document has no end")

    def _new_draft(self) -> Draft:
        return Draft(function=next((name for name in reversed(self._bodies[-20:]) if name), ""))

    def _step(self, here: _List) -> bool:
        """Read one token. Return whether it closes the list."""
        self._tokens += 1
        if self._tokens > MAX_TOKENS:
            raise Unreadable("it is too long to be read")
        skipped = _BLANKS.match(self.text, self.at) or _COMMENT.match(self.text, self.at)
        if skipped:
            self.at = skipped.end()
            return False
        character = self.text[self.at]
        if character == "\n":
            self._newline(here)
        elif here.draft.is_test and character in "()<>|&" and not self.text.startswith(("<(", ">("), self.at):
            self.at += 1
        elif character == ")":
            return self._close(here)
        elif character == "(":
            self._open(here)
        elif operator := _OPERATOR.match(self.text, self.at):
            self.at = operator.end()
            self._operator(here, operator.group())
        elif redirection := _REDIRECTION.match(self.text, self.at):
            self.at = redirection.end()
            self._redirect(here.draft, redirection.group(1))
        else:
            self._add_word(here)
        return False

    def _operator(self, here: _List, operator: str) -> None:
        if here.is_pattern_next and operator == "|" and len(here.draft.words) <= 1:
            here.draft = self._new_draft()
            return
        if here.is_pattern_next:
            self.doubt("a pattern ends where none may")
            here.is_pattern_next = False
        if here.cases and operator.startswith((";;", ";&")):
            here.is_pattern_next = True
        self._end(here, operator)

    def _newline(self, here: _List) -> None:
        self.at += 1
        # `case x` may have its `in` on the next line.
        if not (here.draft.starts_with("case") and len(here.draft.words) == 2):
            self._end(here, "\n")
        for draft, delimiter, strips_tabs in self._heredocs:
            self._read_heredoc(draft, delimiter, strips_tabs)
        self._heredocs.clear()

    def _read_heredoc(self, draft: Draft, delimiter: Word, strips_tabs: bool) -> None:
        lines = []
        while self.at < len(self.text):
            pieces = [self._take_line()]
            # bash joins continued lines before it compares the delimiter: `E\` and an empty line end `<<E`.
            while not delimiter.is_quoted and _is_continued(pieces[-1]) and self.at < len(self.text):
                pieces[-1:] = [pieces[-1][:-1], self._take_line()]
            line = "".join(pieces)
            line = line.lstrip("\t") if strips_tabs else line
            if line == delimiter.text:
                break
            lines.append(line)
        else:
            self.doubt("a here-document has no end")
        body = "\n".join(lines)
        draft.heredocs.append(body)
        if not delimiter.is_quoted and ("$" in body or "`" in body):
            inner = _Reader(body)
            with self.descend():
                inner.level = self.level
                inner.read_quoted(closer="")
            self.drafts.extend(inner.drafts)
            self.texts.extend(inner.texts)
            self.doubt(inner.opaque)

    def _take_line(self) -> str:
        end = self.text.find("\n", self.at)
        end = len(self.text) if end < 0 else end
        line = self.text[self.at : end]
        self.at = end + 1
        return line

    def _open(self, here: _List) -> None:
        draft = here.draft
        if here.is_pattern_next:
            self.at += 1
            return
        is_counting = not draft.words or (draft.starts_with("for") and len(draft.words) == 1)
        if is_counting and self.text.startswith("((", self.at):
            self.at += 2
            self.read_arithmetic()
            return
        empty = _EMPTY_PARENTHESES.match(self.text, self.at)
        if empty and draft.words:
            self._define(draft.words[-1].text)
            self.at = empty.end()
            here.draft = self._new_draft()
            return
        if draft.words and not draft.words[-1].text.endswith("="):
            self.doubt("a parenthesis stands where none is expected")
        self.at += 1
        outer = len(self._bodies)
        self._bodies.append(self._pending_function)
        self._pending_function = ""
        self.read_list(")")
        del self._bodies[outer:]

    def _close(self, here: _List) -> bool:
        self.at += 1
        if here.cases and here.is_pattern_next:
            here.is_pattern_next = False
            if len(here.draft.words) <= 1:
                here.draft.words.clear()
            self._end(here, ")")
            return False
        self._end(here, ")")
        if here.closer == ")":
            return True
        self.doubt("a parenthesis stands where none is expected")
        return False

    def _define(self, name: str) -> None:
        self.doubt("it defines a function")
        self._pending_function = name

    def _redirect(self, draft: Draft, operator: str) -> None:
        blanks = _BLANKS.match(self.text, self.at)
        if blanks:
            self.at = blanks.end()
        target = self.read_word()
        if target is None:
            self.doubt("a redirection has no target")
            return
        draft.redirects.append((operator, target))
        if operator in ("<<", "<<-"):
            if draft.words and "[" in draft.words[-1].text:
                self.doubt("it may count in a subscript or begin a here-document")
            self._heredocs.append((draft, target, operator == "<<-"))

    def _add_word(self, here: _List) -> None:
        start = self.at
        word = self.read_word()
        if word is None:
            # Only `$IFS` gives no word. For anything else, move on by one character to avoid an endless loop.
            self.at += self.at == start
            return
        draft = here.draft
        if not (draft.words or draft.redirects or word.is_quoted) and self._is_keyword(here, word.text):
            return
        draft.words.append(word)
        if draft.starts_with("[["):
            draft.is_test = word.text != "]]"
        elif len(draft.words) == 3 and not word.is_quoted:
            self._third_word(here, word.text)

    def _is_keyword(self, here: _List, text: str) -> bool:
        if here.draft.is_timed and text in ("-p", "--"):
            return True
        if text not in _KEYWORDS:
            return False
        if text == "{":
            self._bodies.append(self._pending_function)
            self._pending_function = ""
            here.draft.function = self._new_draft().function
        elif text == "}" and self._bodies:
            self._bodies.pop()
        elif text == "esac" and here.cases:
            here.cases -= 1
            here.is_pattern_next = False
        here.draft.is_timed = text == "time"
        return True

    def _third_word(self, here: _List, text: str) -> None:
        """Start the commands after a header on the same line: `case x in`, `for x do`, `function f {`."""
        draft = here.draft
        if draft.starts_with("case") and text == "in":
            here.cases += 1
            here.is_pattern_next = True
            draft.words.clear()
        elif text == "do" and any(draft.starts_with(loop) for loop in _LOOPS):
            draft.words.clear()
        elif draft.starts_with("function") and text in ("{", "("):
            self._define(draft.words[1].text)
            draft.words.clear()
            self._is_keyword(here, text)

    def _end(self, here: _List, operator: str) -> None:
        draft = here.draft
        draft.operator = operator
        if any(draft.starts_with(loop) for loop in _LOOPS):
            draft.words.clear()
        elif draft.starts_with("function") and len(draft.words) == 2:
            self._define(draft.words[1].text)
            draft.words.clear()
        if draft.words or draft.redirects:
            self.drafts.append(draft)
        here.draft = self._new_draft()
        if operator in ("|", "|&"):
            here.draft.source = draft

    def doubt(self, reason: str) -> None:
        """Record a reason why the text is opaque. Only the first reason is kept."""
        self.opaque = self.opaque or reason

    @contextlib.contextmanager
    def descend(self) -> Iterator[None]:
        """Enter one level of nesting and save the current word. Raises Unreadable beyond MAX_LEVEL."""
        if self.level >= MAX_LEVEL:
            raise Unreadable("it is nested too deep")
        saved = self._parts, self._is_expanded
        self.level += 1
        try:
            yield
        finally:
            self.level -= 1
            self._parts, self._is_expanded = saved

    def read_word(self) -> Word | None:
        """Read the word at the current position. Return None if there is no word, or only an expansion to blanks
        (`$IFS`).
        """
        self._parts, self._is_expanded = [], False
        start = self.at
        is_pattern = is_quoted = has_brace = False
        while self.at < len(self.text):
            plain = _PLAIN.match(self.text, self.at)
            if plain:
                self._parts.append(plain.group())
                self.at = plain.end()
                continue
            character = self.text[self.at]
            if character in " \t\n;&|()" or (character in "<>" and not self.text.startswith("(", self.at + 1)):
                break
            if character == "$" and self._skip_blank_variable():
                if self._parts or is_quoted:
                    break
                return None
            is_pattern = is_pattern or character in "*?["
            has_brace = has_brace or character == "{"
            is_quoted = is_quoted or character in "\\'\"" or self.text.startswith("$'", self.at)
            self._read_special(character, is_first=self.at == start)
        if has_brace and _BRACES.search(self.text[start : self.at]):
            is_pattern = True
        if self.at == start:
            return None
        return Word("".join(self._parts), self._is_expanded, is_pattern, is_quoted)

    def read_quoted(self, closer: str = '"') -> None:
        """Read text in double quotes up to and including `closer`; "" reads the body of a here-document to the end."""
        while self.at < len(self.text):
            plain = _QUOTED_PLAIN.match(self.text, self.at)
            if plain:
                self._parts.append(plain.group())
                self.at = plain.end()
                continue
            character = self.text[self.at]
            if character == "\\":
                self._read_quoted_escape()
            elif character == "$":
                self._read_dollar(is_quoted=True)
            elif character == "`":
                self._read_backquote()
            elif character == closer:
                self.at += 1
                return
            else:
                self._read_odd(character)
        if closer:
            self.doubt("a quote is not closed")

    def read_arithmetic(self) -> None:
        """Read after `((` up to its `))`. Only substitutions run inside. A text that is not arithmetic makes the script
        opaque.
        """
        depth = 0
        with self.descend():
            while self.at < len(self.text):
                character = self.text[self.at]
                if character == ")":
                    self.at += 1
                    if depth == 0:
                        break
                    depth -= 1
                elif character in "$`\"'\\":
                    self._read_special(character, is_first=False)
                else:
                    depth += character == "("
                    self.at += 1
            if self.text.startswith(")", self.at):
                self.at += 1
            else:
                self.doubt("parentheses may count or group")

    def _read_special(self, character: str, *, is_first: bool) -> None:
        if character == "\\":
            self._parts.append(
                "" if self.text.startswith("\n", self.at + 1) else self.text[self.at + 1 : self.at + 2] or "\\"
            )
            self.at += 2
        elif character == "'":
            self._read_single()
        elif character == '"':
            self.at += 1
            self.read_quoted()
        elif character == "$":
            self._read_dollar(is_quoted=False)
        elif character == "`":
            self._read_backquote()
        elif character in "<>":
            self.at += 2
            self._substitute(lambda: self.read_list(")"))
        elif (
            character == "~"
            and is_first
            and self.text[self.at + 1 : self.at + 2] in ("", "/", " ", "\t", "\n", ";", "&", "|", ")", '"', "'")
        ):
            self._parts.append("$HOME")
            self.at += 1
        else:
            self._read_odd(character)

    def _read_odd(self, character: str) -> None:
        if character == "\x00":
            # bash drops NUL characters, so they must not hide the name of a program.
            self.doubt("it holds NUL characters")
        else:
            self._parts.append(character)
        self.at += 1

    def _read_single(self) -> None:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            self.doubt("a quote is not closed")
            end = len(self.text)
        self._parts.append(self.text[self.at + 1 : end])
        self.at = end + 1

    def _read_quoted_escape(self) -> None:
        following = self.text[self.at + 1 : self.at + 2]
        if following != "\n":
            self._parts.append(following if following and following in '$`"\\' else "\\" + following)
        self.at += 2

    def _skip_blank_variable(self) -> bool:
        # `$IFS` outside quotes separates words like a blank.
        if not self.text.startswith(("$IFS", "${IFS"), self.at):
            return False
        name = _NAME.match(self.text, self.at)
        if name and (name.group(1) or name.group(2)) == "IFS":
            self.at = name.end()
            return True
        if not _CUT_IFS.match(self.text, self.at):
            return False
        with self.descend():
            self.at += 2
            self._read_braces()
        return True

    def _read_dollar(self, *, is_quoted: bool) -> None:
        text, at = self.text, self.at
        if not is_quoted and text.startswith("$'", at):
            self._read_ansi_c()
        elif not is_quoted and text.startswith('$"', at):
            self.at += 1
        elif text.startswith("$((", at):
            self.at += 3
            self._substitute(self.read_arithmetic)
        elif text.startswith("$(", at):
            self.at += 2
            self._substitute(lambda: self.read_list(")"))
        elif positional := _POSITIONAL.match(text, at):
            # A script in a text has no arguments: they expand to nothing, so they must not hide the name of a program.
            self.at, self._is_expanded = positional.end(), True
        elif name := _NAME.match(text, at):
            variable = name.group(1) or name.group(2)
            self._parts.append(" " if variable == "IFS" else f"${variable}")
            self.at, self._is_expanded = name.end(), True
        elif text.startswith("${", at):
            self._read_parameter()
        elif special := _SPECIAL.match(text, at):
            self._parts.append(special.group())
            self.at, self._is_expanded = special.end(), True
        else:
            if text.startswith("$[", at):
                self.doubt("it counts in an old way")
            self._parts.append("$")
            self.at += 1

    def _substitute(self, read: Callable[[], None]) -> None:
        with self.descend():
            read()
        self._parts.append(_UNKNOWN)
        self._is_expanded = True

    def _read_parameter(self) -> None:
        """Read `${name...}` with the substitutions inside. Its value is unknown."""
        if self.text[self.at + 2 : self.at + 3] in (" ", "\t", "\n", "|"):
            self.doubt("braces run commands")
        name = _BRACED_NAME.match(self.text, self.at)
        with self.descend():
            self.at += 2
            self._read_braces()
        self._parts.append("$HOME" if name and name.group(1) == "HOME" else "${...}")
        self._is_expanded = True

    def _read_braces(self) -> None:
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == "}":
                self.at += 1
                return
            if character in "\\'\"$`" or self.text.startswith(("<(", ">("), self.at):
                self._read_special(character, is_first=False)
            else:
                self.at += 1
        self.doubt("a brace is not closed")

    def _read_backquote(self) -> None:
        end = self.at + 1
        while end < len(self.text) and self.text[end] != "`":
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            self.doubt("a backquote is not closed")
        self.texts.append(re.sub(r"\\([\\$`])", r"\1", self.text[self.at + 1 : end]))
        self.at = end + 1
        self._parts.append(_UNKNOWN)
        self._is_expanded = True

    def _read_ansi_c(self) -> None:
        end = self.at + 2
        while end < len(self.text) and self.text[end] != "'":
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            self.doubt("a quote is not closed")
        decoded = _ANSI_C.sub(_decode_ansi_c, self.text[self.at + 2 : end])
        # A NUL ends such a string.
        self._parts.append(decoded.partition("\x00")[0])
        self.at = end + 1


def _is_continued(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _decode_ansi_c(match: "re.Match[str]") -> str:
    hexadecimal = match.group(1) or match.group(2) or match.group(3)
    if hexadecimal or match.group(4):
        code = int(hexadecimal, 16) if hexadecimal else int(match.group(4), 8) & 0xFF
        return chr(code) if code <= 0x10FFFF else ""
    if match.group(5):
        return chr(ord(match.group(5)) & 0x1F)
    letter: str = match.group(6)
    return _ANSI_C_LETTERS.get(letter, letter if letter in "\\'\"?" else "\\" + letter)
