"""SearXNG: GET /search of the operator's own instance, without a key. The instance must allow the json format."""

from toolcrew.workers.web.limits import Deadline
from toolcrew.workers.web.providers.base import SearchQuery, SearchResult, parse_results, with_sites
from toolcrew.workers.web.providers.endpoint import SearchEndpoint

MAX_QUERY_CHARS = 1000


class Searxng:
    """SearchProvider for a SearXNG instance. Domains are search operators, which some engines ignore. The instance
    decides the number of results.
    """

    name = "searxng"

    def __init__(self, endpoint: SearchEndpoint) -> None:
        self._endpoint = endpoint

    def search(self, query: SearchQuery, deadline: Deadline) -> tuple[SearchResult, ...]:
        parameters = {"q": with_sites(query, MAX_QUERY_CHARS), "format": "json"}
        if query.time_range:
            parameters["time_range"] = query.time_range
        reply = self._endpoint.get("/search", parameters, deadline)
        return parse_results(
            reply.get("results") if isinstance(reply, dict) else None, snippet="content", published="publishedDate"
        )
