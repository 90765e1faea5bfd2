"""What a search provider is asked and what it gives, whoever it is."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from workers.web.fences import one_line
from workers.web.limits import Deadline

TimeRange = Literal["day", "week", "month", "year"]

MAX_TITLE_CHARS = 300
MAX_URL_CHARS = 2048
MAX_SNIPPET_CHARS = 1000
MAX_DATE_CHARS = 40
MAX_SCORE = 1e9


@dataclass(frozen=True)
class SearchQuery:
    """Domains are lower case and mean themselves and all below them."""

    words: str
    max_results: int
    include_domains: tuple[str, ...] = ()
    exclude_domains: tuple[str, ...] = ()
    time_range: TimeRange | None = None


@dataclass(frozen=True)
class SearchResult:
    """One hit. Every text is one line, bounded; `url` is http or https. `published`: as the provider spells it."""

    title: str
    url: str
    snippet: str
    published: str | None = None
    score: float | None = None


class SearchProvider(Protocol):
    """A service that searches the web."""

    name: str

    def search(self, query: SearchQuery, deadline: Deadline) -> tuple[SearchResult, ...]:
        """Hits, the best first, at most as many as asked for or as the service gives on one page.

        Domains are wishes here: the tool filters. Raises ToolFailure: NETWORK_ERROR, TIMEOUT, HTTP_ERROR,
        CONFIG_MISSING for a refused key.
        """
        ...


def parse_results(entries: Any, *, snippet: str, published: str | None = None) -> tuple[SearchResult, ...]:
    """The results in a provider's list of objects; `snippet` and `published`: how it calls them. What is no result is
    left out.
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


def _parse_score(told: Any) -> float | None:
    """None for what is no number, and for numbers that JSON has only by mistake."""
    if not isinstance(told, int | float) or isinstance(told, bool) or not abs(told) <= MAX_SCORE:
        return None
    return float(told)


def with_sites(query: SearchQuery, limit: int) -> str:
    """The words with the domains as search operators, for a provider that has no fields for them.

    The words alone when that would be more than `limit` characters: then only the tool's own filter heeds the domains.
    """
    wanted = " OR ".join(f"site:{domain}" for domain in query.include_domains)
    wanted = f"({wanted})" if len(query.include_domains) > 1 else wanted
    parts = [query.words, *([wanted] if wanted else []), *(f"-site:{domain}" for domain in query.exclude_domains)]
    whole = " ".join(parts)
    return whole if len(whole) <= limit else query.words


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
