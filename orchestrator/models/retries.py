"""When a failed request to a model is sent again: how long to wait, as the server asks or by backoff with full
jitter.
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
"""Beside them every 5xx; 501 says that the server will never do it."""
_NOT_IMPLEMENTED = 501
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class RetryPolicy:
    """How often a request is sent, and how long to wait between attempts. `attempts` counts the first one; `max_wait_s`
    bounds one wait, also one that the server asks for; `sleep` waits.
    """

    attempts: int = 6
    base_s: float = 0.5
    max_wait_s: float = 60.0
    factor: float = 2.0
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.base_s < 0 or self.max_wait_s < 0 or self.factor < 1:
            raise ValueError(f"not a retry policy: {self}")


DEFAULT_RETRIES = RetryPolicy()


def is_retried_status(status: int) -> bool:
    return status in RETRIED_STATUSES or (status >= 500 and status != _NOT_IMPLEMENTED)


def compute_backoff_s(policy: RetryPolicy, attempt: int, draw: Callable[[], float] = random.random) -> float:
    """Seconds to wait after failed attempt number `attempt` (from 1), drawn evenly between nothing and the exponential
    bound.

    `draw` gives a number from 0 to 1.
    """
    # Capped before the power: 2 ** 2000 does not fit a float.
    exponent = min(attempt - 1, 64)
    return draw() * min(policy.max_wait_s, policy.base_s * policy.factor**exponent)


def parse_retry_after(headers: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """Seconds that the server asks to wait, None when it does not say so in a known form. A date that has passed: 0.

    `headers` finds names in lower case. A date is read against the server's own clock when it tells it (`date`), else
    against `now`.
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
    """A plain number; signs, exponents, nan and inf are none."""
    if text is None or not _NUMBER.fullmatch(text.strip()):
        return None
    return float(text)


def _parse_date(text: str | None) -> float | None:
    """Seconds since the epoch of an HTTP date."""
    if not text:
        return None
    try:
        seconds = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
    return seconds if math.isfinite(seconds) else None
