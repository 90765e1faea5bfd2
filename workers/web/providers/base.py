"""Interface of search providers: the query, the results, and the parsing of a provider's results."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from toolcrew.workers.web.fences import one_line
from toolcrew.workers.web.limits import Deadline

TimeRange = Literal["day", "week", "month", "year"]

MAX_TITLE_CHARS = 300
MAX_URL_CHARS = 2048
MAX_SNIPPET_CHARS = 1000
MAX_DATE_CHARS = 40
MAX_SCORE = 1e9


@dataclass(frozen=True)
class SearchQuery:
    """A search. Each domain is lower case and includes all of its subdomains."""

    text: str
    max_results: int
    include_domains: tuple[str, ...] = ()
    exclude_domains: tuple[str, ...] = ()
    time_range: TimeRange | None = None


@dataclass(frozen=True)
class SearchResult:
    """A search result. Every text is one bounded line; `url` is http or https. `published`: in the
    provider's format.
    """

    title: str
    url: str
    snippet: str
    published: str | None = None
    score: float | None = None


class SearchProvider(Protocol):
    """A service that searches the web."""

    name: str

    def search(self, query: SearchQuery, deadline: Deadline) -> tuple[SearchResult, ...]:
        """Return results, the best first: at most the requested number, or one page of the service.

        Providers may ignore the domains; the tool filters the results. Raises ToolFailure: NETWORK_ERROR, TIMEOUT,
        HTTP_ERROR, CONFIG_MISSING for a refused key.
        """
        ...


def parse_results(entries: Any, *, snippet: str, published: str | None = None) -> tuple[SearchResult, ...]:
    """Return the results in a provider's list of objects. `snippet`, `published`: the provider's names of these
    fields. Invalid entries are omitted.
    """
    parsed = (_parse_result(entry, snippet, published) for entry in entries) if isinstance(entries, list) else ()
    return tuple(result for result in parsed if result is not None)


def _parse_result(entry: Any, snippet: str, published: str | None) -> SearchResult | None:
    if not isinstance(entry, dict):
        return None
    url = one_line(_text(entry.get("url")), MAX_URL_CHARS + 1)
    if not url.startswith(("http://", "https://")) or " " in url or len(url) > MAX_URL_CHARS:
        return None
    date = _text(entry.get(published)) if published else ""
    return SearchResult(
        title=one_line(_text(entry.get("title")), MAX_TITLE_CHARS) or "(no title)",
        url=url,
        snippet=one_line(_text(entry.get(snippet)), MAX_SNIPPET_CHARS),
        published=one_line(date, MAX_DATE_CHARS) or None,
        score=_parse_score(entry.get("score")),
    )


def _parse_score(value: Any) -> float | None:
    """Return the score; None for a value that is not a number, or a number that is not finite and plausible."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= MAX_SCORE:
        return None
    return float(value)


def with_sites(query: SearchQuery, limit: int) -> str:
    """Return the query with the domains as search operators, for a provider without fields for domains.

    If the result is longer than `limit` characters, only the words are returned. Then only the tool's own filter
    applies the domains.
    """
    included = " OR ".join(f"site:{domain}" for domain in query.include_domains)
    included = f"({included})" if len(query.include_domains) > 1 else included
    parts = [query.text, *([included] if included else []), *(f"-site:{domain}" for domain in query.exclude_domains)]
    whole = " ".join(parts)
    return whole if len(whole) <= limit else query.text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
