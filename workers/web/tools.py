"""The web tools, built from the settings of the worker."""

from collections.abc import Callable
from typing import TypeGuard

from pydantic import SecretStr

from toolcrew.contract.errors import ConfigError, ToolFailure
from toolcrew.contract.settings import WebSettings
from toolcrew.store.web_pages import PageStore
from toolcrew.workers.tools.base import WorkerTool
from toolcrew.workers.web.access_rules import WebAccessRules
from toolcrew.workers.web.addresses import AddressRules
from toolcrew.workers.web.connections import build_tls
from toolcrew.workers.web.fetcher import Fetcher
from toolcrew.workers.web.providers.base import SearchProvider
from toolcrew.workers.web.providers.brave import Brave
from toolcrew.workers.web.providers.endpoint import SearchEndpoint
from toolcrew.workers.web.providers.exa import Exa
from toolcrew.workers.web.providers.searxng import Searxng
from toolcrew.workers.web.providers.tavily import Tavily
from toolcrew.workers.web.resolver import Resolver, SystemResolver
from toolcrew.workers.web.urls import parse_url
from toolcrew.workers.web.webfetch import build_webfetch
from toolcrew.workers.web.websearch import build_websearch

WEB_PORTS = frozenset({80, 443})
"""Ports that are open by default. TOOLCREW_WEBFETCH_ALLOW_HOSTS allows another port of one host."""
TAVILY_URL = "https://api.tavily.com"
BRAVE_URL = "https://api.search.brave.com"
EXA_URL = "https://api.exa.ai"


def _is_set(secret: SecretStr | None) -> TypeGuard[SecretStr]:
    return secret is not None and bool(secret.get_secret_value().strip())


def build_web_tools(
    settings: WebSettings, cache: PageStore, resolver: Resolver | None = None
) -> tuple[WorkerTool, ...]:
    """Return webfetch_tool and websearch_tool. Raises ConfigError for an invalid address of a search service."""
    resolver = resolver or SystemResolver()
    fetcher = Fetcher(resolver, build_access_rules(settings), cache, per_minute=settings.webfetch_per_minute)
    return build_webfetch(fetcher), build_websearch(build_providers(settings, resolver))


def build_access_rules(settings: WebSettings) -> WebAccessRules:
    """Return the operator's rules for the hosts, ports and addresses that webfetch_tool may reach."""
    return WebAccessRules(
        addresses=AddressRules(settings.refuse_ranges, settings.nat64_prefix),
        ports=WEB_PORTS,
        allowed_hosts=frozenset(host.lower() for host in settings.webfetch_allow_hosts),
        only_hosts=frozenset(host.lower() for host in settings.webfetch_only_hosts),
    )


def build_providers(settings: WebSettings, resolver: Resolver) -> tuple[SearchProvider, ...]:
    """Return the configured search services, with the operator's own instance first. Raises ConfigError."""
    tls = build_tls()

    def with_key(
        name: str, base_url: str, key: SecretStr, build: Callable[[SearchEndpoint, SecretStr], SearchProvider]
    ) -> SearchProvider:
        endpoint = SearchEndpoint(name, base_url, f"TOOLCREW_{name.upper()}_API_KEY", resolver, tls=tls)
        return build(endpoint, SecretStr(key.get_secret_value().strip()))

    configured: list[SearchProvider] = []
    if _is_set(settings.searxng_url):
        address = settings.searxng_url.get_secret_value()
        try:
            parse_url(address)
        except ToolFailure as failure:
            raise ConfigError(f"TOOLCREW_SEARXNG_URL: {failure.message}") from None
        advice = "TOOLCREW_SEARXNG_URL, and that the instance's settings list the json format"
        configured.append(Searxng(SearchEndpoint("searxng", address, advice, resolver, tls=tls)))
    if _is_set(settings.tavily_api_key):
        configured.append(with_key("tavily", TAVILY_URL, settings.tavily_api_key, Tavily))
    if _is_set(settings.brave_api_key):
        configured.append(with_key("brave", BRAVE_URL, settings.brave_api_key, Brave))
    if _is_set(settings.exa_api_key):
        configured.append(with_key("exa", EXA_URL, settings.exa_api_key, Exa))
    return tuple(configured)
