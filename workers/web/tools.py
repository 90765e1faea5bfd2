"""The web tools as their worker registers them, put together from settings."""

from collections.abc import Callable
from typing import TypeGuard

from pydantic import SecretStr

from contract.errors import ConfigError, ToolFailure
from store.web_pages import PageStore
from workers.settings import WebSettings
from workers.tools.base import WorkerTool
from workers.web.addresses import AddressRules
from workers.web.connections import build_tls
from workers.web.egress import EgressRules
from workers.web.fetcher import Fetcher
from workers.web.providers.base import SearchProvider
from workers.web.providers.brave import Brave
from workers.web.providers.endpoint import Endpoint
from workers.web.providers.exa import Exa
from workers.web.providers.searxng import Searxng
from workers.web.providers.tavily import Tavily
from workers.web.resolver import Resolver, SystemResolver
from workers.web.urls import parse_url
from workers.web.webfetch import build_webfetch
from workers.web.websearch import build_websearch


def _is_set(secret: SecretStr | None) -> TypeGuard[SecretStr]:
    return secret is not None and bool(secret.get_secret_value().strip())


def build_web_tools(
    settings: WebSettings, cache: PageStore, resolver: Resolver | None = None
) -> tuple[WorkerTool, ...]:
    """webfetch_tool and websearch_tool. Raises ConfigError for an address of a search service that is none."""
    resolver = resolver or SystemResolver()
    fetcher = Fetcher(resolver, build_egress_rules(settings), cache, per_minute=settings.webfetch_per_minute)
    return build_webfetch(fetcher), build_websearch(build_providers(settings, resolver))


def build_egress_rules(settings: WebSettings) -> EgressRules:
    """Where webfetch_tool may go by these settings."""
    return EgressRules(
        addresses=AddressRules(settings.webfetch_refuse_ranges, settings.webfetch_nat64_prefix),
        ports=frozenset(settings.webfetch_ports),
        allowed_hosts=frozenset(host.lower() for host in settings.webfetch_allow_hosts),
        only_hosts=frozenset(host.lower() for host in settings.webfetch_only_hosts),
    )


def build_providers(settings: WebSettings, resolver: Resolver) -> tuple[SearchProvider, ...]:
    """The search services that are configured, in the order of the settings. Raises ConfigError."""
    tls = build_tls()

    def endpoint(name: str, base_url: str, address_setting: str, setting: str) -> Endpoint:
        try:
            parse_url(base_url)
        except ToolFailure as failure:
            raise ConfigError(f"{address_setting}: {failure.message}") from None
        return Endpoint(name, base_url, setting, resolver, tls=tls)

    def with_key(
        name: str, base_url: str, key: SecretStr, build: Callable[[Endpoint, SecretStr], SearchProvider]
    ) -> SearchProvider:
        prefix = f"TOOLCREW_{name.upper()}"
        return build(
            endpoint(name, base_url, f"{prefix}_URL", f"{prefix}_API_KEY"), SecretStr(key.get_secret_value().strip())
        )

    configured: dict[str, SearchProvider] = {}
    if _is_set(settings.searxng_url):
        address = settings.searxng_url.get_secret_value()
        told = "TOOLCREW_SEARXNG_URL, and that the instance's settings list the json format"
        configured["searxng"] = Searxng(endpoint("searxng", address, "TOOLCREW_SEARXNG_URL", told))
    if _is_set(settings.tavily_api_key):
        configured["tavily"] = with_key("tavily", settings.tavily_url, settings.tavily_api_key, Tavily)
    if _is_set(settings.brave_api_key):
        configured["brave"] = with_key("brave", settings.brave_url, settings.brave_api_key, Brave)
    if _is_set(settings.exa_api_key):
        configured["exa"] = with_key("exa", settings.exa_url, settings.exa_api_key, Exa)
    return tuple(configured[name] for name in settings.websearch_order if name in configured)
