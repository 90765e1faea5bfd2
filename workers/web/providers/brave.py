"""Brave Search: GET /res/v1/web/search with a key in X-Subscription-Token."""

import html
import re

from pydantic import SecretStr

from toolcrew.workers.web.limits import Deadline
from toolcrew.workers.web.providers.base import SearchQuery, SearchResult, parse_results, with_sites
from toolcrew.workers.web.providers.endpoint import SearchEndpoint

MAX_COUNT = 20
MAX_QUERY_CHARS = 400
_FRESHNESS = {"day": "pd", "week": "pw", "month": "pm", "year": "py"}
_MARKUP = re.compile(r"</?strong>")


class Brave:
    """SearchProvider for the Brave Search API. The query contains the domains as operators."""

    name = "brave"

    def __init__(self, endpoint: SearchEndpoint, key: SecretStr) -> None:
        self._endpoint = endpoint
        self._key = {"X-Subscription-Token": key}

    def search(self, query: SearchQuery, deadline: Deadline) -> tuple[SearchResult, ...]:
        parameters = {"q": with_sites(query, MAX_QUERY_CHARS), "count": str(min(query.max_results, MAX_COUNT))}
        if query.time_range:
            parameters["freshness"] = _FRESHNESS[query.time_range]
        reply = self._endpoint.get("/res/v1/web/search", parameters, deadline, self._key)
        web = reply.get("web") if isinstance(reply, dict) else None
        entries = web.get("results") if isinstance(web, dict) else None
        if isinstance(entries, list):
            entries = [self._plain(entry) for entry in entries]
        return parse_results(entries, snippet="description", published="age")

    def _plain(self, entry: object) -> object:
        """Return the entry as plain text: Brave marks the matching words in HTML."""
        if not isinstance(entry, dict):
            return entry
        texts = {name: entry[name] for name in ("title", "description") if isinstance(entry.get(name), str)}
        return {**entry, **{name: html.unescape(_MARKUP.sub("", text)) for name, text in texts.items()}}
