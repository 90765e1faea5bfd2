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


class UnreadableScript(Exception):
    """Raised when the text is too long or nested too deep. The message is a clause without a capital letter."""


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
class CommandDraft:
    """Simple command that the reader has not read to its end. `source`: the draft of the command whose output this one
    reads. `heredocs`: the texts of its here-documents, which are added when their lines are read.
    """

    words: list[Word] = field(default_factory=list)
    redirects: list[tuple[str, Word]] = field(default_factory=list)
    heredocs: list[str] = field(default_factory=list)
    source: "CommandDraft | None" = None
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
class ScriptContent:
    """Result of reading a script. `texts`: nested scripts that must be read separately. `opaque`: the first reason why
    the content is not complete.
    """

    drafts: list[CommandDraft]
    texts: list[str]
    opaque: str


@dataclass(eq=False)
class _CommandList:
    """List of commands, up to `closer`. `cases`: the number of open `case` commands. Inside them a `)` may end a
    pattern instead of the list.
    """

    closer: str
    draft: CommandDraft
    cases: int = 0
    is_pattern_next: bool = False


def read_script(text: str) -> ScriptContent:
    """Return the content of a text. Never raises: if the text is too long or nested too deep, only its beginning is
    read.
    """
    reader = _Reader(text)
    try:
        reader.read_list("")
    except UnreadableScript as error:
        reader.mark_opaque(str(error))
    return ScriptContent(reader.drafts, reader.texts, reader.opaque)


class _Reader:
    """Reader of one text. `position`: index of the next character. `texts`: scripts in backquotes. `opaque`: the first
    reason why the text is not readable; "" if there is none.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.level = 0
        self.drafts: list[CommandDraft] = []
        self.texts: list[str] = []
        self.opaque = ""
        self._parts: list[str] = []
        self._is_expanded = False
        self._heredocs: list[tuple[CommandDraft, Word, bool]] = []
        self._bodies: list[str] = []
        self._pending_function = ""
        self._tokens = 0

    def read_list(self, closer: str) -> None:
        """Read commands up to and including `closer`; "" means the end of the text."""
        if self._heredocs and closer:
            self.mark_opaque("a here-document and a substitution share a line")
        with self.descend():
            commands = _CommandList(closer, self._new_draft())
            while self.position < len(self.text):
                if self._step(commands):
                    return
            self._end_command(commands, "")
            if closer:
                self.mark_opaque("a parenthesis is not closed")
            if self._heredocs:
                self._heredocs.clear()
                self.mark_opaque("a here-document has no end")

    def _new_draft(self) -> CommandDraft:
        return CommandDraft(function=next((name for name in reversed(self._bodies[-20:]) if name), ""))

    def _step(self, commands: _CommandList) -> bool:
        """Read one token. Return whether it closes the list."""
        self._tokens += 1
        if self._tokens > MAX_TOKENS:
            raise UnreadableScript("it is too long to be read")
        skipped = _BLANKS.match(self.text, self.position) or _COMMENT.match(self.text, self.position)
        if skipped:
            self.position = skipped.end()
            return False
        character = self.text[self.position]
        if character == "\n":
            self._read_newline(commands)
        elif commands.draft.is_test and character in "()<>|&" and not self.text.startswith(("<(", ">("), self.position):
            self.position += 1
        elif character == ")":
            return self._close_group(commands)
        elif character == "(":
            self._open_group(commands)
        elif operator := _OPERATOR.match(self.text, self.position):
            self.position = operator.end()
            self._read_operator(commands, operator.group())
        elif redirection := _REDIRECTION.match(self.text, self.position):
            self.position = redirection.end()
            self._read_redirection(commands.draft, redirection.group(1))
        else:
            self._add_word(commands)
        return False

    def _read_operator(self, commands: _CommandList, operator: str) -> None:
        if commands.is_pattern_next and operator == "|" and len(commands.draft.words) <= 1:
            commands.draft = self._new_draft()
            return
        if commands.is_pattern_next:
            self.mark_opaque("a pattern ends where none may")
            commands.is_pattern_next = False
        if commands.cases and operator.startswith((";;", ";&")):
            commands.is_pattern_next = True
        self._end_command(commands, operator)

    def _read_newline(self, commands: _CommandList) -> None:
        self.position += 1
        # `case x` may have its `in` on the next line.
        if not (commands.draft.starts_with("case") and len(commands.draft.words) == 2):
            self._end_command(commands, "\n")
        for draft, delimiter, strips_tabs in self._heredocs:
            self._read_heredoc(draft, delimiter, strips_tabs)
        self._heredocs.clear()

    def _read_heredoc(self, draft: CommandDraft, delimiter: Word, strips_tabs: bool) -> None:
        lines = []
        while self.position < len(self.text):
            pieces = [self._take_line()]
            # bash joins continued lines before it compares the delimiter: `E\` and an empty line end `<<E`.
            while not delimiter.is_quoted and _is_continued(pieces[-1]) and self.position < len(self.text):
                pieces[-1:] = [pieces[-1][:-1], self._take_line()]
            line = "".join(pieces)
            line = line.lstrip("\t") if strips_tabs else line
            if line == delimiter.text:
                break
            lines.append(line)
        else:
            self.mark_opaque("a here-document has no end")
        body = "\n".join(lines)
        draft.heredocs.append(body)
        if not delimiter.is_quoted and ("$" in body or "`" in body):
            inner = _Reader(body)
            with self.descend():
                inner.level = self.level
                inner.read_quoted(closer="")
            self.drafts.extend(inner.drafts)
            self.texts.extend(inner.texts)
            self.mark_opaque(inner.opaque)

    def _take_line(self) -> str:
        end = self.text.find("\n", self.position)
        end = len(self.text) if end < 0 else end
        line = self.text[self.position : end]
        self.position = end + 1
        return line

    def _open_group(self, commands: _CommandList) -> None:
        draft = commands.draft
        if commands.is_pattern_next:
            self.position += 1
            return
        is_counting = not draft.words or (draft.starts_with("for") and len(draft.words) == 1)
        if is_counting and self.text.startswith("((", self.position):
            self.position += 2
            self.read_arithmetic()
            return
        empty = _EMPTY_PARENTHESES.match(self.text, self.position)
        if empty and draft.words:
            self._begin_function(draft.words[-1].text)
            self.position = empty.end()
            commands.draft = self._new_draft()
            return
        if draft.words and not draft.words[-1].text.endswith("="):
            self.mark_opaque("a parenthesis stands where none is expected")
        self.position += 1
        outer = len(self._bodies)
        self._bodies.append(self._pending_function)
        self._pending_function = ""
        self.read_list(")")
        del self._bodies[outer:]

    def _close_group(self, commands: _CommandList) -> bool:
        self.position += 1
        if commands.cases and commands.is_pattern_next:
            commands.is_pattern_next = False
            if len(commands.draft.words) <= 1:
                commands.draft.words.clear()
            self._end_command(commands, ")")
            return False
        self._end_command(commands, ")")
        if commands.closer == ")":
            return True
        self.mark_opaque("a parenthesis stands where none is expected")
        return False

    def _begin_function(self, name: str) -> None:
        self.mark_opaque("it defines a function")
        self._pending_function = name

    def _read_redirection(self, draft: CommandDraft, operator: str) -> None:
        blanks = _BLANKS.match(self.text, self.position)
        if blanks:
            self.position = blanks.end()
        target = self.read_word()
        if target is None:
            self.mark_opaque("a redirection has no target")
            return
        draft.redirects.append((operator, target))
        if operator in ("<<", "<<-"):
            if draft.words and "[" in draft.words[-1].text:
                self.mark_opaque("it may be arithmetic in a subscript, or begin a here-document")
            self._heredocs.append((draft, target, operator == "<<-"))

    def _add_word(self, commands: _CommandList) -> None:
        start = self.position
        word = self.read_word()
        if word is None:
            # Only `$IFS` gives no word. For anything else, move on by one character to avoid an endless loop.
            self.position += self.position == start
            return
        draft = commands.draft
        if not (draft.words or draft.redirects or word.is_quoted) and self._is_keyword(commands, word.text):
            return
        draft.words.append(word)
        if draft.starts_with("[["):
            draft.is_test = word.text != "]]"
        elif len(draft.words) == 3 and not word.is_quoted:
            self._read_third_word(commands, word.text)

    def _is_keyword(self, commands: _CommandList, text: str) -> bool:
        if commands.draft.is_timed and text in ("-p", "--"):
            return True
        if text not in _KEYWORDS:
            return False
        if text == "{":
            self._bodies.append(self._pending_function)
            self._pending_function = ""
            commands.draft.function = self._new_draft().function
        elif text == "}" and self._bodies:
            self._bodies.pop()
        elif text == "esac" and commands.cases:
            commands.cases -= 1
            commands.is_pattern_next = False
        commands.draft.is_timed = text == "time"
        return True

    def _read_third_word(self, commands: _CommandList, text: str) -> None:
        """After the first words of `case x in`, `for x do` or `function f {`, start to read the commands on the same
        line.
        """
        draft = commands.draft
        if draft.starts_with("case") and text == "in":
            commands.cases += 1
            commands.is_pattern_next = True
            draft.words.clear()
        elif text == "do" and any(draft.starts_with(loop) for loop in _LOOPS):
            draft.words.clear()
        elif draft.starts_with("function") and text in ("{", "("):
            self._begin_function(draft.words[1].text)
            draft.words.clear()
            self._is_keyword(commands, text)

    def _end_command(self, commands: _CommandList, operator: str) -> None:
        draft = commands.draft
        draft.operator = operator
        if any(draft.starts_with(loop) for loop in _LOOPS):
            draft.words.clear()
        elif draft.starts_with("function") and len(draft.words) == 2:
            self._begin_function(draft.words[1].text)
            draft.words.clear()
        if draft.words or draft.redirects:
            self.drafts.append(draft)
        commands.draft = self._new_draft()
        if operator in ("|", "|&"):
            commands.draft.source = draft

    def mark_opaque(self, reason: str) -> None:
        """Record a reason why the text is opaque. Only the first reason is kept."""
        self.opaque = self.opaque or reason

    @contextlib.contextmanager
    def descend(self) -> Iterator[None]:
        """Enter one level of nesting and save the current word. Raises UnreadableScript beyond MAX_LEVEL."""
        if self.level >= MAX_LEVEL:
            raise UnreadableScript("it is nested too deep")
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
        start = self.position
        is_pattern = is_quoted = has_brace = False
        while self.position < len(self.text):
            plain = _PLAIN.match(self.text, self.position)
            if plain:
                self._parts.append(plain.group())
                self.position = plain.end()
                continue
            character = self.text[self.position]
            if character in " \t\n;&|()" or (character in "<>" and not self.text.startswith("(", self.position + 1)):
                break
            if character == "$" and self._skip_blank_variable():
                if self._parts or is_quoted:
                    break
                return None
            is_pattern = is_pattern or character in "*?["
            has_brace = has_brace or character == "{"
            is_quoted = is_quoted or character in "\\'\"" or self.text.startswith("$'", self.position)
            self._read_special(character, is_first=self.position == start)
        if has_brace and _BRACES.search(self.text[start : self.position]):
            is_pattern = True
        if self.position == start:
            return None
        return Word("".join(self._parts), self._is_expanded, is_pattern, is_quoted)

    def read_quoted(self, closer: str = '"') -> None:
        """Read text in double quotes up to and including `closer`; "" reads the body of a here-document to the end."""
        while self.position < len(self.text):
            plain = _QUOTED_PLAIN.match(self.text, self.position)
            if plain:
                self._parts.append(plain.group())
                self.position = plain.end()
                continue
            character = self.text[self.position]
            if character == "\\":
                self._read_quoted_escape()
            elif character == "$":
                self._read_dollar(is_quoted=True)
            elif character == "`":
                self._read_backquote()
            elif character == closer:
                self.position += 1
                return
            else:
                self._read_other(character)
        if closer:
            self.mark_opaque("a quote is not closed")

    def read_arithmetic(self) -> None:
        """Read after `((` up to its `))`. Only substitutions run inside. A text that is not arithmetic makes the script
        opaque.
        """
        depth = 0
        with self.descend():
            while self.position < len(self.text):
                character = self.text[self.position]
                if character == ")":
                    self.position += 1
                    if depth == 0:
                        break
                    depth -= 1
                elif character in "$`\"'\\":
                    self._read_special(character, is_first=False)
                else:
                    depth += character == "("
                    self.position += 1
            if self.text.startswith(")", self.position):
                self.position += 1
            else:
                self.mark_opaque("its parentheses may be arithmetic or group commands")

    def _read_special(self, character: str, *, is_first: bool) -> None:
        next_character = self.text[self.position + 1 : self.position + 2]
        if character == "\\":
            self._parts.append("" if next_character == "\n" else next_character or "\\")
            self.position += 2
        elif character == "'":
            self._read_single()
        elif character == '"':
            self.position += 1
            self.read_quoted()
        elif character == "$":
            self._read_dollar(is_quoted=False)
        elif character == "`":
            self._read_backquote()
        elif character in "<>":
            self.position += 2
            self._substitute(lambda: self.read_list(")"))
        elif (
            character == "~" and is_first and next_character in ("", "/", " ", "\t", "\n", ";", "&", "|", ")", '"', "'")
        ):
            self._parts.append("$HOME")
            self.position += 1
        else:
            self._read_other(character)

    def _read_other(self, character: str) -> None:
        if character == "\x00":
            # bash drops NUL characters, so they must not hide the name of a program.
            self.mark_opaque("it holds NUL characters")
        else:
            self._parts.append(character)
        self.position += 1

    def _read_single(self) -> None:
        end = self.text.find("'", self.position + 1)
        if end < 0:
            self.mark_opaque("a quote is not closed")
            end = len(self.text)
        self._parts.append(self.text[self.position + 1 : end])
        self.position = end + 1

    def _read_quoted_escape(self) -> None:
        following = self.text[self.position + 1 : self.position + 2]
        if following != "\n":
            self._parts.append(following if following and following in '$`"\\' else "\\" + following)
        self.position += 2

    def _skip_blank_variable(self) -> bool:
        # `$IFS` outside quotes separates words like a blank.
        if not self.text.startswith(("$IFS", "${IFS"), self.position):
            return False
        name = _NAME.match(self.text, self.position)
        if name and (name.group(1) or name.group(2)) == "IFS":
            self.position = name.end()
            return True
        if not _CUT_IFS.match(self.text, self.position):
            return False
        with self.descend():
            self.position += 2
            self._read_braces()
        return True

    def _read_dollar(self, *, is_quoted: bool) -> None:
        text, position = self.text, self.position
        if not is_quoted and text.startswith("$'", position):
            self._read_ansi_c()
        elif not is_quoted and text.startswith('$"', position):
            self.position += 1
        elif text.startswith("$((", position):
            self.position += 3
            self._substitute(self.read_arithmetic)
        elif text.startswith("$(", position):
            self.position += 2
            self._substitute(lambda: self.read_list(")"))
        elif positional := _POSITIONAL.match(text, position):
            # A script in a text has no arguments: they expand to nothing, so they must not hide the name of a program.
            self.position, self._is_expanded = positional.end(), True
        elif name := _NAME.match(text, position):
            variable = name.group(1) or name.group(2)
            self._parts.append(" " if variable == "IFS" else f"${variable}")
            self.position, self._is_expanded = name.end(), True
        elif text.startswith("${", position):
            self._read_parameter()
        elif special := _SPECIAL.match(text, position):
            self._parts.append(special.group())
            self.position, self._is_expanded = special.end(), True
        else:
            if text.startswith("$[", position):
                self.mark_opaque("it uses the old arithmetic syntax $[...]")
            self._parts.append("$")
            self.position += 1

    def _substitute(self, read: Callable[[], None]) -> None:
        with self.descend():
            read()
        self._parts.append(_UNKNOWN)
        self._is_expanded = True

    def _read_parameter(self) -> None:
        """Read `${name...}` with the substitutions inside. Its value is unknown."""
        if self.text[self.position + 2 : self.position + 3] in (" ", "\t", "\n", "|"):
            self.mark_opaque("braces run commands")
        name = _BRACED_NAME.match(self.text, self.position)
        with self.descend():
            self.position += 2
            self._read_braces()
        self._parts.append("$HOME" if name and name.group(1) == "HOME" else "${...}")
        self._is_expanded = True

    def _read_braces(self) -> None:
        while self.position < len(self.text):
            character = self.text[self.position]
            if character == "}":
                self.position += 1
                return
            if character in "\\'\"$`" or self.text.startswith(("<(", ">("), self.position):
                self._read_special(character, is_first=False)
            else:
                self.position += 1
        self.mark_opaque("a brace is not closed")

    def _read_backquote(self) -> None:
        end = self.position + 1
        while end < len(self.text) and self.text[end] != "`":
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            self.mark_opaque("a backquote is not closed")
        self.texts.append(re.sub(r"\\([\\$`])", r"\1", self.text[self.position + 1 : end]))
        self.position = end + 1
        self._parts.append(_UNKNOWN)
        self._is_expanded = True

    def _read_ansi_c(self) -> None:
        end = self.position + 2
        while end < len(self.text) and self.text[end] != "'":
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            self.mark_opaque("a quote is not closed")
        decoded = _ANSI_C.sub(_decode_ansi_c, self.text[self.position + 2 : end])
        # A NUL ends a string in `$'...'`.
        self._parts.append(decoded.partition("\x00")[0])
        self.position = end + 1


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
