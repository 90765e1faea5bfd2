"""Retries of failed requests to a model: how often, and the wait before each. A wait that the server requests blocks
the endpoint for all requests (request_limits.py).
"""

import asyncio
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

RETRIED_STATUSES = frozenset({408, 409, 429})
"""Status codes below 500 that are retried. Every 5xx is retried too, except 501 (not implemented), because a retry
cannot succeed.
"""
_NOT_IMPLEMENTED = 501
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class RetryPolicy:
    """Limits of the attempts to send a request, and of the wait between them.

    `attempts` includes the first one. `max_wait_s` limits one wait, including one that the server requests.
    `max_total_s` limits the time from the first failure to the last attempt. `sleep`: the function that waits, for
    tests.
    """

    attempts: int = 6
    base_s: float = 0.5
    max_wait_s: float = 60.0
    factor: float = 2.0
    max_total_s: float = math.inf
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.base_s < 0 or self.max_wait_s < 0 or self.factor < 1:
            raise ValueError(
                f"{self} is invalid: use at least 1 attempt, waits of at least 0 s and a factor of at least 1"
            )


DEFAULT_RETRIES = RetryPolicy()


def is_retried_status(status: int) -> bool:
    return status in RETRIED_STATUSES or (status >= 500 and status != _NOT_IMPLEMENTED)


def compute_backoff_s(policy: RetryPolicy, attempt: int) -> float:
    """Return the seconds to wait after failed attempt number `attempt` (from 1): random between 0 and the exponential
    limit.
    """
    # Limit the exponent, because 2 ** 2000 does not fit a float.
    exponent = min(attempt - 1, 64)
    return random.random() * min(policy.max_wait_s, policy.base_s * policy.factor**exponent)


def parse_retry_after(headers: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """Return the seconds that the server requests to wait, 0 for a date in the past, None without a valid header.

    `headers`: mapping with names in lower case. If the header is a date, it is compared with the server's time (header
    `date`), or with `now` if the server sent no time.
    """
    milliseconds = _parse_number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    seconds = _parse_number(headers.get("retry-after"))
    if seconds is not None:
        return seconds
    until = _parse_date(headers.get("retry-after"))
    if until is None:
        return None
    server_now = _parse_date(headers.get("date"))
    return max(0.0, until - (now() if server_now is None else server_now))


def _parse_number(text: str | None) -> float | None:
    """Parse a plain number. Signs, exponents, nan and inf are rejected."""
    if text is None or not _NUMBER.fullmatch(text.strip()):
        return None
    return float(text)


def _parse_date(text: str | None) -> float | None:
    """Return an HTTP date in seconds since the epoch."""
    if not text:
        return None
    try:
        seconds = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
    return seconds if math.isfinite(seconds) else None
