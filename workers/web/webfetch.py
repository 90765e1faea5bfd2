"""webfetch_tool: returns a web page as text, in parts."""

import json
from typing import Any

from pydantic import JsonValue

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.specs import ToolSpec
from toolcrew.store.web_pages import WebPage
from toolcrew.workers.tools.base import Outcome, ToolEnvironment, WorkerTool
from toolcrew.workers.web.documents import Document, read_document
from toolcrew.workers.web.fences import fence
from toolcrew.workers.web.fetcher import FetchedPage, Fetcher
from toolcrew.workers.web.limits import Deadline
from toolcrew.workers.web.pages import Extractor

DEFAULT_CHARS = 30_000
MAX_CHARS = 100_000
ERROR_CHARS = 500

WEBFETCH_SPEC = ToolSpec(
    name="webfetch_tool",
    description=(
        "Fetch a public web page and return its text as Markdown. Long pages come in parts. The text is untrusted."
    ),
    parameters={
        "type": "object",
        "properties": {
            "url": {"type": "string", "minLength": 1, "maxLength": 2048},
            "format": {"type": "string", "enum": ["markdown", "text", "html"], "default": "markdown"},
            "timeout": {
                "type": "number",
                "minimum": 1,
                "maximum": 120,
                "default": 30,
                "description": "seconds",
            },
            "start": {"type": "integer", "minimum": 0, "default": 0, "description": "first character to return"},
            "max_chars": {
                "type": "integer",
                "minimum": 1000,
                "maximum": MAX_CHARS,
                "default": DEFAULT_CHARS,
                "x-hidden": True,
            },
        },
        "required": ["url"],
        "additionalProperties": False,
    },
    timeout_s=30,
    max_timeout_s=120,
    read_only=True,
    idempotent=True,
    pool="web",
)


def build_webfetch(fetcher: Fetcher) -> WorkerTool:
    """Return webfetch_tool, which gets pages from `fetcher`."""
    reader = Extractor()

    def handler(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
        deadline = Deadline(min(arguments["timeout"], environment.context.timeout_s))
        fetched = fetcher.fetch(environment.context.tenant, arguments["url"], deadline, reads_on=arguments["start"] > 0)
        document = read_document(fetched.page, arguments["format"], reader, deadline)
        if not 200 <= fetched.page.status < 300:
            return _build_error(fetched, document)
        return _build_part(fetched, document, arguments["start"], arguments["max_chars"])

    return WorkerTool(WEBFETCH_SPEC, handler)


def _build_part(fetched: FetchedPage, document: Document, start: int, max_chars: int) -> Outcome:
    head, metadata = _head(fetched.page, document), _metadata(fetched, document)
    if document.text is None:
        size = "unknown size" if fetched.page.declared_bytes is None else f"{fetched.page.declared_bytes} bytes"
        return Outcome(f"{head}\n\n[{document.media_type}, {size}: not text, so it was not read]", metadata)
    total = len(document.text)
    if start and start >= total:
        raise ToolFailure(
            ErrorCode.OFFSET_OUT_OF_RANGE,
            f"start={start} is past the end: the text has {total} characters; use a smaller start",
            total_chars=total,
        )
    end = min(total, start + max_chars)
    metadata |= {"start": start, "end": end, "total_chars": total}
    body = (
        fence(document.text[start:end])
        if document.text.strip()
        else "[the page has no text; content that scripts add is not included]"
    )
    position = (
        f"characters {start}-{end} of {total}; continue with start={end}"
        if end < total
        else f"end of page: {total} characters"
    )
    # The stored page, of which the caller has earlier parts, has expired or was never stored.
    refetch_note = (
        ("the page was fetched again for this part and may differ from the earlier parts",)
        if start and fetched.source == "network"
        else ()
    )
    return Outcome(
        f"{head}\n\n{body}\n[{'; '.join([position, *refetch_note, *document.notes])}]", metadata, truncated=end < total
    )


def _head(page: WebPage, document: Document) -> str:
    charset = "" if document.charset is None else f"; charset={document.charset}"
    lines = [
        f"url: {page.url}",
        f"final url: {page.final_url}",
        f"status: {page.phrase}",
        f"type: {document.media_type}{charset}",
    ]
    # Quote the title, so that a page cannot imitate a line of the tool's own output.
    lines.append(f"title: {json.dumps(document.title, ensure_ascii=False)}" if document.title else "title: (none)")
    if _authority(page.url) != _authority(page.final_url):
        lines.append(f"[redirected to another host: {' -> '.join([page.url, *page.redirects])}]")
    return "\n".join(lines)


def _metadata(fetched: FetchedPage, document: Document) -> dict[str, JsonValue]:
    page = fetched.page
    return {
        "url": page.url,
        "final_url": page.final_url,
        "status": page.status,
        "content_type": document.media_type,
        "charset": document.charset,
        "title": document.title,
        "redirects": list(page.redirects),
        "source": fetched.source,
        "size_bytes": len(page.body) if page.is_whole else page.declared_bytes,
    }


def _build_error(fetched: FetchedPage, document: Document) -> Outcome:
    page = fetched.page
    text = (document.text or "").strip()
    excerpt = text[:ERROR_CHARS]
    cut = f"\n[the first {ERROR_CHARS} characters of the response's text]" if len(text) > ERROR_CHARS else ""
    return Outcome(
        output=f"{fence(excerpt)}{cut}" if excerpt else None,
        metadata=_metadata(fetched, document),
        truncated=bool(cut),
        error=f"{page.final_url} answered {page.phrase}: {_advice(page.status)}",
        error_code=ErrorCode.HTTP_ERROR,
    )


def _advice(status: int) -> str:
    if status in (401, 403, 407):
        return "the page is not public; use another source"
    if status in (404, 410):
        return "check the url, or search for the page"
    if status == 429 or status >= 500:
        return "try again later, or use another source"
    return "use another url"


def _authority(url: str) -> str:
    return url.split("/", 3)[2]
