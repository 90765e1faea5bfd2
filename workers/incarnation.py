"""Which name a sandbox worker serves under: that of its sandboxd's boot, unless another serves it, or it was given up."""

import itertools
import time
from collections.abc import Callable

import redis
import structlog

from contract.errors import BrokerUnavailable, ConfigError
from contract.hosts import HEARTBEAT_S, HostReport
from contract.names import host_queue
from workers.processes import is_surely_gone
from workers.reporting import Reporter, Verdict

log = structlog.get_logger(__name__)

STALE_S = HEARTBEAT_S + 1.5
"""A worker that has not reported anew for so long does not live, or hangs: its place is taken."""
LOOK_S = 0.25


def take_incarnation(host: str, boot: str, open_reporter: Callable[[str], Reporter], build: Callable[[str], HostReport]) -> Reporter:
    """Report under the first name of this boot that was not given up: `host.<host>.<boot>`, then with `.2`, `.3`.

    `build`: the first report of a queue. Raises ConfigError when another worker serves the sandboxd, BrokerUnavailable.
    """
    try:
        for number in itertools.count(1):
            name = host_queue(host, boot if number == 1 else f"{boot}.{number}")
            reporter = open_reporter(name)
            if _take(reporter, build(name)):
                return reporter
            log.warning("incarnation_given_up_before", queue=name)
    except redis.RedisError as error:
        raise BrokerUnavailable(
            f"Redis did not take the worker's first report ({error}): see that it is up and may be written to"
        ) from error
    raise AssertionError


def _take(reporter: Reporter, first: HostReport) -> bool:
    """False when the name was given up. Raises ConfigError while another worker reports under it."""
    verdict = reporter.report(first)
    while verdict is Verdict.REPLACED:
        other = reporter.seen()
        if other is not None and other.worker and not _is_gone(reporter, other):
            raise ConfigError(
                f"another worker ({other.worker}) serves {reporter.queue}: stop it first, since one sandboxd has one worker; for more calls at a time raise "
                "TOOLCREW_CONCURRENCY"
            )
        verdict = reporter.report(first, instead_of=other.worker if other is not None else "")
    return verdict is Verdict.KEPT


def _is_gone(reporter: Reporter, other: HostReport) -> bool:
    """Whether a worker does not report any more: known at once of a process of this machine, else seen when no report follows."""
    if is_surely_gone(other.process):
        return True
    log.info("another_worker_reported", queue=reporter.queue, worker=other.worker, waits_s=STALE_S)
    until = time.monotonic() + STALE_S
    while time.monotonic() < until:
        time.sleep(LOOK_S)
        seen = reporter.seen()
        if seen is None or seen.worker != other.worker:
            return seen is None or not seen.worker
        if seen.reported_at != other.reported_at:
            return False
    return True
