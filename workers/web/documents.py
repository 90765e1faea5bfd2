"""Conversion of a fetched page to the text that a model reads, in the requested format."""

import json
import re
from dataclasses import dataclass
from typing import Literal

from toolcrew.store.web_pages import WebPage
from toolcrew.workers.web.charsets import decode_body
from toolcrew.workers.web.fences import one_line, printable
from toolcrew.workers.web.limits import Deadline
from toolcrew.workers.web.media_types import declared_charset, is_html, is_json, media_type, reads_as_text
from toolcrew.workers.web.pages import Extractor

MAX_INPUT_CHARS = 1024 * 1024
MAX_OUTPUT_CHARS = 8 * 1024 * 1024
INDENT = "  "

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
DocumentFormat = Literal["markdown", "text", "html"]
MAX_TITLE_CHARS = 200


def lay_out_json(text: str) -> str | None:
    """Return JSON with one value per line. Returns None if `text` is not JSON, or is too large or too deep."""
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
    """Return the whitespace that the layout needs before `token`."""
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
    """A page as text. `text`: None for content that is not text. `notes`: facts about the conversion that the reader
    must know.
    """

    media_type: str
    text: str | None
    title: str = ""
    charset: str | None = None
    notes: tuple[str, ...] = ()


def read_document(page: WebPage, kind: DocumentFormat, extractor: Extractor, deadline: Deadline) -> Document:
    """Convert a page to a document. Raises the errors of Extractor.extract."""
    name = media_type(page.content_type)
    if not reads_as_text(name):
        return Document(name, None)
    decoded = decode_body(page.body, declared_charset(page.content_type), is_html=is_html(name))
    notes = []
    # Add no note about a guessed charset: JSON without a charset is UTF-8, and ASCII reads the same in every supported
    # charset.
    if decoded.source == "guess" and not (is_json(name) and decoded.charset == "utf-8") and not decoded.text.isascii():
        notes.append(f"the page does not say its charset: read as {decoded.charset}")
    if decoded.replaced:
        notes.append(f"{decoded.replaced} characters that are not {decoded.charset} are shown as \ufffd")
    text, title = decoded.text, ""
    if is_html(name) and kind != "html":
        if 200 <= page.status < 300:
            extracted = extractor.extract(text, page.final_url, kind, deadline)
        else:
            # Only the first characters of an error page are shown, so a search for its main part is not worth the
            # time.
            extracted = extractor.extract_plain(text, page.final_url, kind, deadline)
        text, title = extracted.text, extracted.title
        if extracted.note and text:
            notes.append(extracted.note)
    elif is_json(name) and kind != "html":
        laid_out = lay_out_json(text)
        text = text if laid_out is None else laid_out
        if laid_out is None:
            notes.append("shown unchanged: it is not JSON, or too large to be laid out")
    return Document(name, printable(text), one_line(title, MAX_TITLE_CHARS), decoded.charset, tuple(notes))
