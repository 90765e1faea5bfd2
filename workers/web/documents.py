"""A fetched page as the text that a model reads, in the format it asked for."""

from dataclasses import dataclass
from typing import Literal

from store.web_pages import Page
from workers.web.charsets import decode_body
from workers.web.fences import one_line, printable
from workers.web.json_layout import lay_out_json
from workers.web.limits import Deadline
from workers.web.media_types import declared_charset, is_html, is_json, media_type, reads_as_text
from workers.web.pages import Extractor

DocumentFormat = Literal["markdown", "text", "html"]

MAX_TITLE_CHARS = 200


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
