"""Tavily: POST /search with a bearer key."""

from typing import Any

from pydantic import SecretStr

from toolcrew.workers.web.limits import Deadline
from toolcrew.workers.web.providers.base import SearchQuery, SearchResult, parse_results
from toolcrew.workers.web.providers.endpoint import SearchEndpoint


class Tavily:
    """SearchProvider for the Tavily API. Supports domains and time ranges."""

    name = "tavily"

    def __init__(self, endpoint: SearchEndpoint, key: SecretStr) -> None:
        self._endpoint = endpoint
        self._key = {"Authorization": SecretStr(f"Bearer {key.get_secret_value()}")}

    def search(self, query: SearchQuery, deadline: Deadline) -> tuple[SearchResult, ...]:
        content: dict[str, Any] = {
            "query": query.text,
            "max_results": query.max_results,
            "search_depth": "basic",
            "include_answer": False,
        }
        if query.include_domains:
            content["include_domains"] = list(query.include_domains)
        if query.exclude_domains:
            content["exclude_domains"] = list(query.exclude_domains)
        if query.time_range:
            content["time_range"] = query.time_range
        reply = self._endpoint.post("/search", content, deadline, self._key)
        return parse_results(
            reply.get("results") if isinstance(reply, dict) else None, snippet="content", published="published_date"
        )
