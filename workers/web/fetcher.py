"""Fetching of a URL: parse, check, resolve, check the addresses, connect, send. Every redirect repeats all steps.
Fresh pages come from the cache.
"""

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.store.web_pages import FRESH_S, PageStore, WebPage, fresh_for_s, may_be_kept, validator
from toolcrew.workers.web.access_rules import WebAccessRules
from toolcrew.workers.web.connections import build_tls
from toolcrew.workers.web.exchange import ConnectionOptions, Head, HttpRequest, HttpResponse, exchange
from toolcrew.workers.web.limits import Deadline, FetchLimits
from toolcrew.workers.web.media_types import media_type, reads_as_text
from toolcrew.workers.web.resolver import Resolver, find_addresses
from toolcrew.workers.web.urls import Target, parse_location, parse_url, refused

ACCEPT = "text/html,application/xhtml+xml,text/markdown,text/plain,application/json;q=0.9,*/*;q=0.5"
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True)
class FetchedPage:
    """A page and its `source`: `cache` (stored and fresh), `revalidated` (stored and confirmed by the server) or
    `network`.
    """

    page: WebPage
    source: str


@dataclass(frozen=True)
class _Hop:
    target: Target
    response: HttpResponse
    redirects: tuple[str, ...]


class Fetcher:
    """Fetcher of pages for all tenants. Only the cache outlives a call; connections and cookies do not."""

    def __init__(
        self,
        resolver: Resolver,
        rules: WebAccessRules,
        store: PageStore,
        *,
        per_minute: int | None = None,
        limits: FetchLimits | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the fetcher. `per_minute`: limit of fetches per tenant; pages from the cache do not count."""
        self._resolver = resolver
        self._rules = rules
        self._store = store
        self._per_minute = per_minute
        self._limits = limits or FetchLimits()
        self._tls = tls or build_tls()
        self._clock = clock

    def fetch(self, tenant: str, url: str, deadline: Deadline, *, reads_on: bool = False) -> FetchedPage:
        """Return the page at `url`, even with an error status. `reads_on`: the call reads a later part of a page, so it
        needs the stored page and accepts an older one.

        Raises ToolFailure: INVALID_ARGUMENTS, SECURITY_REFUSED, NETWORK_ERROR, TIMEOUT, FILE_TOO_LARGE.
        """
        target = parse_url(url)
        # This check comes before the cache lookup: a host that the operator has closed is not served from the cache.
        self._rules.check_target(target)
        stored = self._store.take(tenant, target.url)
        if stored is not None and not self._is_still_allowed(stored):
            stored = None
        if stored is not None and self._is_usable(stored, reads_on):
            return FetchedPage(stored, "cache")
        self._check_rate(tenant)
        last = self._follow(target, deadline, stored)
        if (
            stored is not None
            and last.response.head.status == HTTPStatus.NOT_MODIFIED
            and _conditions(last.target, stored)
        ):
            confirmed = self._confirm(stored, last.response.head)
            self._store.keep(tenant, confirmed)
            return FetchedPage(confirmed, "revalidated")
        page = self._page(target, last)
        if page.status == HTTPStatus.OK and page.is_whole and may_be_kept(last.response.head.headers):
            self._store.keep(tenant, page)
        return FetchedPage(page, "network")

    def _check_rate(self, tenant: str) -> None:
        if self._per_minute is not None and self._store.count(tenant) > self._per_minute:
            raise refused(
                f"more than {self._per_minute} pages were fetched within a minute; continue in the next minute"
            )

    def _is_still_allowed(self, stored: WebPage) -> bool:
        """Return whether the rules still allow the final URL of a stored page. The operator may have closed the host
        since.
        """
        try:
            self._rules.check_target(parse_url(stored.final_url))
        except ToolFailure:
            return False
        return True

    def _is_usable(self, stored: WebPage, reads_on: bool) -> bool:
        return self._clock() < (stored.fetched_at + FRESH_S if reads_on else stored.fresh_until)

    def _follow(self, target: Target, deadline: Deadline, stored: WebPage | None) -> _Hop:
        redirects: tuple[str, ...] = ()
        base = target
        while True:
            try:
                self._rules.check_target(target)
                response = self._send_request(target, deadline, stored)
            except ToolFailure as failure:
                raise (_of_redirect(base, failure) if redirects else failure) from None
            location = response.head.headers.get("location")
            if response.head.status not in _REDIRECTS or location is None:
                return _Hop(target, response, redirects)
            if len(redirects) >= self._limits.redirects:
                raise ToolFailure(
                    ErrorCode.NETWORK_ERROR,
                    f"more than {self._limits.redirects} redirects, the last from {target.url}: fetch the final URL "
                    "directly",
                    cause="redirects",
                )
            base, target = target, self._parse_redirect(target, location)
            redirects = (*redirects, target.url)

    def _parse_redirect(self, base: Target, location: str) -> Target:
        """Return the target of a redirect, checked like a requested URL. Raises ToolFailure(SECURITY_REFUSED)."""
        try:
            target = parse_location(base, _as_utf8(location))
            if base.scheme == "https" and target.scheme == "http":
                raise refused("it leads from https to http")
        except ToolFailure as failure:
            raise _of_redirect(base, failure) from None
        return target

    def _send_request(self, target: Target, deadline: Deadline, stored: WebPage | None) -> HttpResponse:
        addresses = find_addresses(self._resolver, target, deadline, self._limits)
        self._rules.check_addresses(target, addresses)
        # Every hop gets a new request, so no header for one origin reaches the next origin.
        request = HttpRequest(target, headers={"Accept": ACCEPT, **_conditions(target, stored)})
        return exchange(request, ConnectionOptions(addresses, self._limits, deadline, self._tls), self._body_bytes)

    def _body_bytes(self, head: Head) -> int | None:
        if head.status in _REDIRECTS or head.status == HTTPStatus.NOT_MODIFIED:
            return 0
        if not reads_as_text(media_type(head.headers.get("content-type", ""))):
            return 0
        return None if 200 <= head.status < 300 else self._limits.error_body_bytes

    def _page(self, requested: Target, hop: _Hop) -> WebPage:
        head, now = hop.response.head, self._clock()
        length = head.headers.get("content-length", "")
        return WebPage(
            url=requested.url,
            final_url=hop.target.url,
            status=head.status,
            phrase=head.phrase,
            content_type=head.headers.get("content-type", "")[:256],
            body=hop.response.body,
            is_whole=hop.response.is_whole,
            declared_bytes=int(length) if length.isdecimal() and len(length) < 16 else None,
            redirects=hop.redirects,
            etag=validator(head.headers, "etag"),
            last_modified=validator(head.headers, "last-modified"),
            fetched_at=now,
            fresh_until=now + fresh_for_s(head.headers),
        )

    def _confirm(self, stored: WebPage, head: Head) -> WebPage:
        now = self._clock()
        return stored.model_copy(update={"fetched_at": now, "fresh_until": now + fresh_for_s(head.headers)})


def _of_redirect(base: Target, failure: ToolFailure) -> ToolFailure:
    """Convert the failure of a redirect from `base`. An invalid URL in a redirect becomes SECURITY_REFUSED, because the
    caller cannot fix the URL.
    """
    code = ErrorCode.SECURITY_REFUSED if failure.code is ErrorCode.INVALID_ARGUMENTS else failure.code
    return ToolFailure(
        code, f"{base.host} redirects, and {failure.message}", **{**failure.metadata, "redirected_by": base.url}
    )


def _conditions(target: Target, stored: WebPage | None) -> dict[str, str]:
    """Return the headers that ask the server whether the stored page is still valid. Only the URL from which the page
    came gets them.
    """
    if stored is None or target.url != stored.final_url:
        return {}
    conditions = {"If-None-Match": stored.etag, "If-Modified-Since": stored.last_modified}
    return {name: value for name, value in conditions.items() if value}


def _as_utf8(header: str) -> str:
    try:
        return header.encode("latin-1").decode("utf-8")
    except UnicodeDecodeError:
        return header
