"""Exa: POST /search with a key in x-api-key."""

import time
from collections.abc import Callable
from typing import Any

from pydantic import SecretStr

from toolcrew.workers.web.limits import Deadline
from toolcrew.workers.web.providers.base import MAX_SNIPPET_CHARS, SearchQuery, SearchResult, parse_results
from toolcrew.workers.web.providers.endpoint import SearchEndpoint

_DAYS = {"day": 1, "week": 7, "month": 31, "year": 366}


class Exa:
    """SearchProvider for the Exa API. Supports domains; a time range becomes a start date."""

    name = "exa"

    def __init__(self, endpoint: SearchEndpoint, key: SecretStr, clock: Callable[[], float] = time.time) -> None:
        self._endpoint = endpoint
        self._key = {"x-api-key": key}
        self._clock = clock

    def search(self, query: SearchQuery, deadline: Deadline) -> tuple[SearchResult, ...]:
        content: dict[str, Any] = {
            "query": query.text,
            "numResults": query.max_results,
            "contents": {"text": {"maxCharacters": MAX_SNIPPET_CHARS}},
        }
        if query.include_domains:
            content["includeDomains"] = list(query.include_domains)
        if query.exclude_domains:
            content["excludeDomains"] = list(query.exclude_domains)
        if query.time_range:
            since = time.gmtime(self._clock() - _DAYS[query.time_range] * 86400)
            content["startPublishedDate"] = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", since)
        reply = self._endpoint.post("/search", content, deadline, self._key)
        return parse_results(
            reply.get("results") if isinstance(reply, dict) else None, snippet="text", published="publishedDate"
        )
