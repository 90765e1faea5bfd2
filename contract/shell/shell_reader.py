"""Bash text as drafts of simple commands: quotes, expansions, here-documents, groups. One pass, and it never runs anything."""

import re
from dataclasses import dataclass, field

from contract.shell.shell_words import Unreadable, Word, WordReader

__all__ = ["Draft", "Reading", "Word", "read_script"]

MAX_TOKENS = 10_000
"""Words, operators and blanks of one text; bodies of here-documents do not count."""

_OPERATOR = re.compile(r";;&|;;|;&|;|&&|&(?!>)|\|\||\|&|\|")
_REDIRECTION = re.compile(r"\d*(&>>|&>|<<<|<<-|<<|<>|<&|>>|>\||>&|<(?!\()|>(?!\())")
_BLANKS = re.compile(r"(?:[ \t]|\\\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_EMPTY_PARENTHESES = re.compile(r"\([ \t]*\)")
_KEYWORDS = frozenset({"if", "then", "elif", "else", "fi", "while", "until", "do", "done", "esac", "!", "{", "}", "time", "coproc"})
_LOOPS = ("for", "select")


@dataclass(eq=False)
class Draft:
    """A simple command while it is read. `source`: the draft whose output it reads. `heredocs`: bodies, filled in when their lines come."""

    words: list[Word] = field(default_factory=list)
    redirects: list[tuple[str, Word]] = field(default_factory=list)
    heredocs: list[str] = field(default_factory=list)
    source: "Draft | None" = None
    operator: str = ""
    function: str = ""
    is_test: bool = False
    is_timed: bool = False

    def stdin(self) -> str | None:
        """What its last here-document or here-string says, None when it has none."""
        strings = [target.text for operator, target in self.redirects if operator == "<<<"]
        given = [*strings, *self.heredocs]
        return given[-1] if given else None

    def starts_with(self, keyword: str) -> bool:
        # After a redirection no word is a keyword.
        return bool(self.words) and self.words[0].text == keyword and not self.words[0].is_quoted and not self.redirects


@dataclass(frozen=True)
class Reading:
    """What a text holds. `texts`: scripts inside it that are to be read on their own. `opaque`: the first thing that could not be told."""

    drafts: list[Draft]
    texts: list[str]
    opaque: str


@dataclass(eq=False)
class _List:
    """One list of commands, up to `closer`. `cases`: how many `case` are open; then a `)` may end a pattern and not the list."""

    closer: str
    draft: Draft
    cases: int = 0
    is_pattern_next: bool = False


def read_script(text: str) -> Reading:
    """What the text holds; of one that nests or goes on beyond reason only its beginning. Never raises."""
    reader = _ScriptReader(text)
    try:
        reader.read_list("")
    except Unreadable as error:
        reader.doubt(str(error))
    return Reading(reader.drafts, reader.texts, reader.opaque)


class _ScriptReader(WordReader):
    """Reads lists of commands; words are read by its base."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.drafts: list[Draft] = []
        self._heredocs: list[tuple[Draft, Word, bool]] = []
        self._bodies: list[str] = []
        self._pending_function = ""
        self._tokens = 0

    def read_list(self, closer: str) -> None:
        """Commands up to `closer`, which is taken too; "" means the end of the text."""
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

    def read_substitution(self) -> None:
        self.read_list(")")

    def _new_draft(self) -> Draft:
        return Draft(function=next((name for name in reversed(self._bodies[-20:]) if name), ""))

    def _step(self, here: _List) -> bool:
        """Read one token. True when it was the list's closer."""
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
            end = self.text.find("\n", self.at)
            end = len(self.text) if end < 0 else end
            line = self.text[self.at : end]
            self.at = end + 1
            line = line.lstrip("\t") if strips_tabs else line
            if line == delimiter.text:
                break
            lines.append(line)
        else:
            self.doubt("a here-document has no end")
        body = "\n".join(lines)
        draft.heredocs.append(body)
        if not delimiter.is_quoted and ("$" in body or "`" in body):
            inner = _ScriptReader(body)
            with self.descend():
                inner.level = self.level
                inner.read_quoted(closer="")
            self.drafts.extend(inner.drafts)
            self.texts.extend(inner.texts)
            self.doubt(inner.opaque)

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
            # Only `$IFS` is no word; anything else must not stop the reading.
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
        """Where a header ends and commands begin on the same line: `case x in`, `for x do`, `function f {`."""
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
