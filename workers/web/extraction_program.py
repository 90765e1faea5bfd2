"""A standalone program: reads HTML on standard input and writes its text as JSON on standard output. Hostile pages
are parsed only in this process, so an attack on a parser does not reach the worker.

Input: a line of JSON `{"format": "markdown" | "text", "url": ..., "method": "main" | "plain", "cpu_s": ...}`, then
the page in UTF-8. Output: `{"title": ..., "text": ..., "is_main": ..., "is_too_deep": ..., "whole_chars": ...}`. The
worker starts the program by its path, without environment variables. The program imports no module of this project.
"""

import contextlib
import ctypes
import importlib
import json
import os
import re
import resource
import signal
import struct
import sys
from html.parser import HTMLParser
from typing import Any

MEMORY_BYTES = 256 * 1024 * 1024
"""Memory limit. A page that can be read within the CPU time needs up to 190 MiB. Every call may run one such program.
"""
OUTPUT_BYTES = 24 * 1024 * 1024
SHORT_CHARS = 250
"""A main part shorter than this is rejected if the whole page has more than twice as much text."""

_BLOCKS = frozenset(
    re.findall(
        "[a-z0-9]+",
        "address article aside blockquote br caption dd details div dl dt fieldset figcaption figure footer form h1 h2 "
        "h3 h4 h5 h6 header hr li main nav ol option p pre section summary table tbody td tfoot th thead tr ul",
    )
)
_HIDDEN = frozenset(("script", "style", "template", "svg", "iframe", "object"))
# Numbers of Landlock's system calls, which are the same on every architecture, and the rights that each Landlock
# version can forbid.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION, _BENEATH_PATH, _PR_SET_NO_NEW_PRIVS = 1, 1, 38
_READ_FILES = 0b1100
_ALL_OF_FILES, _TCP, _SIGNALS_AND_SOCKETS = (1 << 13) - 1, 0b11, 0b11

_HEADINGS = {f"h{n}": "#" * n + " " for n in range(1, 7)}


class PlainReader(HTMLParser):
    """Parser that collects all visible text of a page. The parser is iterative, so deep nesting cannot exhaust the
    stack.
    """

    def __init__(self, is_markdown: bool) -> None:
        super().__init__(convert_charrefs=True)
        self._is_markdown = is_markdown
        self._pieces: list[str] = []
        self._title: list[str] = []
        self._hidden: str | None = None
        self._hidden_depth = 0
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # Use only the first title, up to the next tag: embedded pictures have their own titles, and an unclosed title
        # must not include the whole page.
        self._in_title = tag == "title" and self._hidden is None and not self._title
        if self._hidden is not None:
            self._hidden_depth += tag == self._hidden
        elif tag in _HIDDEN:
            self._hidden, self._hidden_depth = tag, 1
        elif tag in _BLOCKS:
            self._pieces.append("\n")
            if self._is_markdown:
                self._pieces.append("- " if tag == "li" else _HEADINGS.get(tag, ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
        if self._hidden is not None:
            self._hidden_depth -= tag == self._hidden
            if self._hidden_depth <= 0:
                self._hidden = None
        elif tag in _BLOCKS:
            self._pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self._title.append(data)
        elif self._hidden is None:
            self._pieces.append(data)

    def text(self) -> str:
        lines = (" ".join(line.split()) for line in "".join(self._pieces).split("\n"))
        return "\n".join(
            line for line in lines if line and line not in ("-", "#", "##", "###", "####", "#####", "######")
        )

    def title(self) -> str:
        return " ".join("".join(self._title).split())


def read_plain(page: str, is_markdown: bool) -> PlainReader:
    reader = PlainReader(is_markdown)
    reader.feed(page)
    reader.close()
    return reader


def read_main(page: str, url: str, kind: str) -> tuple[str | None, bool]:
    """Return the main part, or None if no main part was found; and whether the parser stopped because of deep
    nesting.
    """
    import trafilatura
    from lxml import etree, html

    # `huge_tree` stays off to keep the parser's own depth limit of 256.
    parser = html.HTMLParser(encoding="utf-8", no_network=True, huge_tree=False)
    tree = html.document_fromstring(page.encode("utf-8"), parser=parser)
    if any(entry.type == etree.ErrorTypes.ERR_RESOURCE_LIMIT or "depth" in entry.message for entry in parser.error_log):
        return None, True
    text = trafilatura.extract(
        tree,
        url=url,
        output_format=kind,
        include_links=kind == "markdown",
        include_comments=False,
        include_formatting=kind == "markdown",
        favor_recall=True,
    )
    return text, False


def extract(order: dict[str, Any], page: str) -> dict[str, Any]:
    is_markdown = order["format"] == "markdown"
    plain = read_plain(page, is_markdown)
    whole, main, is_too_deep = plain.text(), None, False
    if order["method"] == "main" and whole:
        # A hostile page may crash the parsers and end this program. The worker then runs the program again with
        # method `plain`.
        main, is_too_deep = read_main(page, order["url"], "markdown" if is_markdown else "txt")
    is_main = main is not None and bool(main.strip()) and not (len(main) < SHORT_CHARS and len(whole) > 2 * len(main))
    return {
        "title": plain.title(),
        "text": main if is_main else whole,
        "is_main": is_main,
        "is_too_deep": is_too_deep,
        "whole_chars": len(whole),
    }


def limit_resources(cpu_s: int) -> None:
    for kind, limit in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, OUTPUT_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(kind, (limit, limit))
    # The alarm ends this program even if the worker that started it dies.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(cpu_s + 1)
    # If memory runs out, the kernel must kill this program and not the worker. Some runtimes refuse this setting.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def confine() -> bool:
    """Confine this process with Landlock; return whether the kernel did so. Afterwards the process can open only files
    that Python imports, cannot connect to servers, and cannot signal or inspect other processes. Otherwise it could
    read the worker's environment variables in /proc.
    """
    libc = ctypes.CDLL(None)
    version = libc.syscall(_CREATE_RULESET, None, 0, _GET_VERSION)
    if version < 1:
        return False
    rules = struct.pack("=QQQ", _ALL_OF_FILES, _TCP, _SIGNALS_AND_SOCKETS)[
        : 8 if version < 4 else 16 if version < 6 else 24
    ]
    ruleset = libc.syscall(_CREATE_RULESET, rules, len(rules), 0)
    for folder in filter(os.path.isdir, sys.path):
        opened = os.open(folder, os.O_PATH)
        libc.syscall(_ADD_RULE, ruleset, _BENEATH_PATH, struct.pack("=Qi", _READ_FILES, opened), 0)
        os.close(opened)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    confined: int = libc.syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return confined == 0


def main() -> int:
    order = json.loads(sys.stdin.buffer.readline(65536))
    limit_resources(int(order["cpu_s"]))
    if order["method"] == "main":
        # Import before the confinement: the shared libraries can be in any folder.
        importlib.import_module("trafilatura")
    confine()
    page = sys.stdin.buffer.read().decode("utf-8", "replace")
    sys.stdout.buffer.write(json.dumps(extract(order, page), ensure_ascii=False).encode("utf-8", "replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
