"""Name resolution: one bounded lookup per request."""

import ipaddress
import queue
import socket
import threading
from typing import Protocol

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.workers.web.limits import Deadline, FetchLimits
from toolcrew.workers.web.urls import Address, Target

MAX_ANSWERS = 16
MAX_LOOKUPS = 8


class Resolver(Protocol):
    """Interface for name lookups."""

    def resolve(self, host: str, deadline: Deadline, limit_s: float) -> tuple[Address, ...]:
        """Return every address of `host`, IPv4 and IPv6: at least one and at most MAX_ANSWERS.

        Raises ToolFailure: NETWORK_ERROR when there are no addresses or too many, TIMEOUT past `limit_s` or the
        deadline.
        """
        ...


class SystemResolver:
    """Resolver of the operating system. Each lookup runs in its own thread, because the system call cannot be
    interrupted.
    """

    def __init__(self, max_lookups: int = MAX_LOOKUPS) -> None:
        self._max_lookups = max_lookups
        self._lookups: list[threading.Thread] = []

    def resolve(self, host: str, deadline: Deadline, limit_s: float) -> tuple[Address, ...]:
        limit_s = deadline.remaining_s(f"looking up {host}", limit_s)
        # Limit the threads: each lives until the system's resolver returns, so a slow name server could fill the
        # process with threads.
        self._lookups = [lookup for lookup in self._lookups if lookup.is_alive()]
        if len(self._lookups) >= self._max_lookups:
            raise _build_failure(
                ErrorCode.TIMEOUT, f"DNS: too many lookups are running to look up {host}; try again later"
            )
        answer: queue.SimpleQueue[list[str] | OSError] = queue.SimpleQueue()
        lookup = threading.Thread(target=_look_up, args=(host, answer), name="dns", daemon=True)
        self._lookups.append(lookup)
        lookup.start()
        try:
            result = answer.get(timeout=limit_s)
        except queue.Empty:
            raise _build_failure(
                ErrorCode.TIMEOUT, f"DNS: no answer for {host} within {limit_s:g} s; try again or use another host"
            ) from None
        if isinstance(result, OSError):
            raise _build_failure(
                ErrorCode.NETWORK_ERROR, f"DNS: {host} has no address ({result.strerror}); check the name"
            )
        return parse_answers(host, result)


def _look_up(host: str, answer: "queue.SimpleQueue[list[str] | OSError]") -> None:
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        answer.put([str(entry[4][0]) for entry in entries])
    except OSError as error:
        answer.put(error)
    except UnicodeError:
        answer.put(OSError(0, "the name cannot be looked up"))


def find_addresses(resolver: Resolver, target: Target, deadline: Deadline, limits: FetchLimits) -> tuple[Address, ...]:
    """Return the address in the URL, or every address of its name. Raises the ToolFailures of Resolver.resolve."""
    if target.literal is not None:
        return (target.literal,)
    return resolver.resolve(target.host, deadline, limits.resolve_s)


def parse_answers(host: str, answers: list[str]) -> tuple[Address, ...]:
    """Return the addresses of a lookup, in order, without duplicates. Raises the ToolFailures of Resolver.resolve."""
    try:
        addresses = tuple(dict.fromkeys(ipaddress.ip_address(answer) for answer in answers))
    except ValueError:
        raise _build_failure(ErrorCode.NETWORK_ERROR, f"DNS: the answer for {host} is not an address") from None
    if not 0 < len(addresses) <= MAX_ANSWERS:
        raise _build_failure(
            ErrorCode.NETWORK_ERROR, f"DNS: {len(addresses)} addresses for {host}; from 1 to {MAX_ANSWERS} are accepted"
        )
    return addresses


def _build_failure(code: ErrorCode, message: str) -> ToolFailure:
    return ToolFailure(code, message, cause="dns")
