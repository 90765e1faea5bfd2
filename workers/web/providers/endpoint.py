"""Requests to a search service, with the same limits as every other request. A busy service is tried a second time.
Error messages never contain the key.
"""

import email.utils
import json
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from pydantic import SecretStr

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.json_limits import has_more_values_in_text
from toolcrew.workers.web.connections import build_tls
from toolcrew.workers.web.exchange import ConnectionOptions, HttpRequest, HttpResponse, exchange
from toolcrew.workers.web.limits import Deadline, FetchLimits
from toolcrew.workers.web.resolver import Resolver, find_addresses
from toolcrew.workers.web.urls import parse_url

MAX_WAIT_S = 5.0
"""Maximum pause in seconds. A service that asks for a longer pause is skipped."""
DEFAULT_WAIT_S = 1.0
MAX_VALUES = 50_000
"""Maximum number of values in a response. A response with some hundred results has a few thousand values."""
_SECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")


@dataclass(frozen=True)
class SearchEndpoint:
    """Address and access of a search service. The operator configures the address, so the address rules do not apply.

    `setting`: the setting that an error message names. `pause`: waits for a number of seconds.
    """

    name: str
    base_url: str = field(repr=False)
    setting: str
    resolver: Resolver
    limits: FetchLimits = field(default_factory=FetchLimits)
    tls: ssl.SSLContext = field(default_factory=build_tls)
    pause: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.time

    def get(
        self, path: str, parameters: Mapping[str, str], deadline: Deadline, key: Mapping[str, SecretStr] | None = None
    ) -> Any:
        """Send a GET request and return the JSON of the response. Raises the ToolFailures of SearchProvider.search."""
        return self._request("GET", f"{path}?{urlencode(parameters)}", {}, b"", key or {}, deadline)

    def post(self, path: str, content: Mapping[str, Any], deadline: Deadline, key: Mapping[str, SecretStr]) -> Any:
        """Send a POST request with JSON and return the JSON of the response. Raises the ToolFailures of
        SearchProvider.search.
        """
        return self._request(
            "POST", path, {"Content-Type": "application/json"}, json.dumps(content).encode(), key, deadline
        )

    def _request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        key: Mapping[str, SecretStr],
        deadline: Deadline,
    ) -> Any:
        headers = {
            "Accept": "application/json",
            **headers,
            **{name: secret.get_secret_value() for name, secret in key.items()},
        }
        response = self._send(method, path, headers, body, deadline)
        if response.head.status == 429:
            wait_s = self._wait_s(response.head.headers)
            if wait_s <= MAX_WAIT_S and deadline.is_within(wait_s):
                self.pause(wait_s)
                response = self._send(method, path, headers, body, deadline)
        return self._parse(response)

    def _send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, deadline: Deadline
    ) -> HttpResponse:
        target = parse_url(self.base_url.rstrip("/") + path)
        addresses = find_addresses(self.resolver, target, deadline, self.limits)
        return exchange(
            HttpRequest(target, method, headers, body),
            ConnectionOptions(addresses, self.limits, deadline, self.tls),
            lambda head: None if head.status == 200 else self.limits.error_body_bytes,
        )

    def _wait_s(self, headers: Mapping[str, str]) -> float:
        """Return the pause in seconds that the service asks for: Retry-After, or the first window of
        X-RateLimit-Reset.
        """
        value = headers.get("retry-after") or headers.get("x-ratelimit-reset", "").partition(",")[0]
        if _SECONDS.fullmatch(value.strip()):
            return float(value)
        date = email.utils.parsedate_tz(value)
        return max(0.0, email.utils.mktime_tz(date) - self.clock()) if date is not None else DEFAULT_WAIT_S

    def _parse(self, response: HttpResponse) -> Any:
        status = response.head.status
        if status in (401, 403):
            raise ToolFailure(
                ErrorCode.CONFIG_MISSING,
                f"{self.name} refuses the request ({status}): check {self.setting}",
                status=status,
            )
        if status != 200:
            # The body is not shown: a service may repeat the key in it.
            raise ToolFailure(
                ErrorCode.HTTP_ERROR, f"{self.name} answered {response.head.phrase}: try again later", status=status
            )
        try:
            text = response.body.decode()
            if has_more_values_in_text(text, MAX_VALUES):
                raise ValueError("too many values")
            return json.loads(text)
        except (ValueError, RecursionError):
            raise ToolFailure(
                ErrorCode.HTTP_ERROR, f"{self.name} did not answer with JSON: check {self.setting}", status=status
            ) from None
