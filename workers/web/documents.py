"""A fetched page as the text that a model reads, in the format it asked for."""

import json
import re
from dataclasses import dataclass
from typing import Literal

from store.web_pages import Page
from workers.web.charsets import decode_body
from workers.web.fences import one_line, printable
from workers.web.limits import Deadline
from workers.web.media_types import declared_charset, is_html, is_json, media_type, reads_as_text
from workers.web.pages import Extractor

MAX_INPUT_CHARS = 1024 * 1024
MAX_OUTPUT_CHARS = 8 * 1024 * 1024
INDENT = "  "

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
DocumentFormat = Literal["markdown", "text", "html"]
MAX_TITLE_CHARS = 200


def lay_out_json(text: str) -> str | None:
    """`text` with a line a value. None when it is not JSON, or too large or too deep to lay out."""
    if len(text) > MAX_INPUT_CHARS or not _is_json(text):
        return None
    pieces: list[str] = []
    size = depth = 0
    previous = ""
    for match in _TOKEN.finditer(text):
        token = match[0]
        depth -= token in ("}", "]")
        piece = _gap(previous, token, depth) + token
        depth += token in ("{", "[")
        size += len(piece)
        if size > MAX_OUTPUT_CHARS:
            return None
        pieces.append(piece)
        previous = token
    return "".join(pieces)


def _gap(previous: str, token: str, depth: int) -> str:
    """What stands before `token`."""
    if token in ("}", "]"):
        return "" if previous in ("{", "[") else "\n" + INDENT * depth
    if previous == ":":
        return " "
    return "\n" + INDENT * depth if previous in ("{", "[", ",") else ""


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


@dataclass(frozen=True)
class Document:
    """`text` None: content that is none. `notes`: what a reader must know of how the text came about."""

    media_type: str
    text: str | None
    title: str = ""
    charset: str | None = None
    notes: tuple[str, ...] = ()


def read_document(page: Page, kind: DocumentFormat, extractor: Extractor, deadline: Deadline) -> Document:
    """Raises ToolFailure as Extractor.extract does."""
    name = media_type(page.content_type)
    if not reads_as_text(name):
        return Document(name, None)
    decoded = decode_body(page.body, declared_charset(page.content_type), is_html=is_html(name))
    notes = []
    # JSON is UTF-8 where nobody says otherwise, and of pure ASCII nothing can be guessed wrongly.
    if decoded.how == "guess" and not (is_json(name) and decoded.charset == "utf-8") and not decoded.text.isascii():
        notes.append(f"the page does not say its charset: read as {decoded.charset}")
    if decoded.replaced:
        notes.append(f"{decoded.replaced} characters that are not {decoded.charset} are shown as \ufffd")
    text, title = decoded.text, ""
    if is_html(name) and kind != "html":
        if 200 <= page.status < 300:
            extracted = extractor.extract(text, page.final_url, kind, deadline)
        else:
            # Of an error a few words are shown: its main part is not worth a search.
            extracted = extractor.extract_plain(text, page.final_url, kind, deadline)
        text, title = extracted.text, extracted.title
        if extracted.note and text:
            notes.append(extracted.note)
    elif is_json(name) and kind != "html":
        laid_out = lay_out_json(text)
        text = text if laid_out is None else laid_out
        if laid_out is None:
            notes.append("shown as it came: it is not JSON, or too large to be laid out")
    return Document(name, printable(text), one_line(title, MAX_TITLE_CHARS), decoded.charset, tuple(notes))
