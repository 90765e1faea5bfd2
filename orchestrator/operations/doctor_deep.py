"""`toolcrew doctor --deep`: a real signed call on each host, so that secret, path, sandbox and clock are proved and not
assumed.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from contract.errors import OperatorError, ToolcrewError, ToolFailure
from contract.hosts import HostReport
from contract.metrics import REFUSALS
from contract.settings import BrokerSettings
from contract.tenancy import DEFAULT_TENANT
from orchestrator.dispatch.pool_connection import PoolConnection, open_pool
from orchestrator.dispatch.sessions import Session, Start
from orchestrator.operations.findings import Report
from store.connection import SKEW_WARNING_S, read_clock

HOST_S = 90.0
"""For one host: a sandbox may have to be made, and a busy host has others to serve."""
AT_ONCE = 4
QUEUE_WAIT_S = 30.0
SESSION_TTL_S = 120.0
"""After which the host takes the session away, should nobody close it."""


async def examine_hosts(broker: BrokerSettings, reports: Sequence[HostReport], report: Report) -> None:
    """On each sandbox host that serves: open a session, run one program in it, close it. For the default tenant."""
    able = [one for one in reports if one.kind == "sandbox" and one.state == "serving"]
    if not able:
        report.note(
            "calls", "no sandbox host serves, so none was tried", "start one: `toolcrew serve worker` beside a sandboxd"
        )
    places = asyncio.Semaphore(AT_ONCE)
    # In the order of the hosts, whoever is done first.
    for found in await asyncio.gather(*(_tried(broker, one, places) for one in able)):
        report.findings += found.findings


@dataclass(frozen=True)
class _OnlyHost:
    """As if there were no other."""

    only: HostReport

    async def reports(self) -> list[HostReport]:
        return [self.only]


async def _tried(broker: BrokerSettings, host: HostReport, places: asyncio.Semaphore) -> Report:
    found, name = Report(), host.host
    async with places:
        try:
            async with (
                asyncio.timeout(HOST_S),
                open_pool(broker, queue_wait_s=QUEUE_WAIT_S, hosts=_OnlyHost(host)) as pool,
            ):
                await _call(pool, name, found)
        except TimeoutError:
            found.broken(
                "calls", f"{name}: no answer within {HOST_S:g} s", f"look at the logs of worker and sandboxd on {name}"
            )
        except ToolFailure as failure:
            _tell_failure(name, failure, found)
        except OperatorError as error:
            found.broken(
                "calls", f"{name}: {error}", f"the same TOOLCREW_SECRET on both sides; else see the logs on {name}"
            )
        except ToolcrewError as error:
            found.broken("calls", f"{name}: {error}", f"see the logs of worker and sandboxd on {name}")
    return found


def _tell_failure(name: str, failure: ToolFailure, found: Report) -> None:
    if failure.code.value not in REFUSALS:
        found.broken(
            "calls",
            f"{name}: {failure.message}",
            f"the same TOOLCREW_SECRET on both sides; else see the logs on {name}",
        )
    else:
        found.note(
            "calls",
            f"{name}: the default tenant may not do that there ({failure.message})",
            "allow it, or try with `toolcrew call TOOL --tenant TENANT`",
        )


async def _call(pool: PoolConnection, name: str, found: Report) -> None:
    began = time.monotonic()
    async with await Session.open(
        pool.dispatcher, pool.blobs, tenant=DEFAULT_TENANT, start=Start(ttl_s=SESSION_TTL_S)
    ) as session:
        opened_s = time.monotonic() - began
        before = await read_clock(pool.redis)
        done = await session.exec(["date", "+%s.%N"], timeout_s=10)
        after = await read_clock(pool.redis)
    if done.returncode != 0:
        found.broken(
            "calls",
            f"{name}: `date` ended with {done.returncode} in a sandbox",
            "rebuild its image (scripts/build-image)",
        )
        return
    found.good(
        "calls",
        f"{name}: a signed call was answered in {after - before:.3f} s, in a session opened in {opened_s:.2f} s",
    )
    judge_clock(name, done.stdout, before, after, found)


def judge_clock(name: str, told: bytes, before: float, after: float, found: Report) -> None:
    """The sandbox has its host's clock. What it says is a guest's word."""
    try:
        there = float(told[:40])
    except ValueError:
        found.note("clock", f"{name}: a sandbox does not tell the time", "see what its image has for `date`")
        return
    off_s = max(before - there, there - after, 0.0)
    if not off_s < SKEW_WARNING_S:
        where = "behind" if there < before else "ahead of"
        found.note(
            "clock",
            f"{name}: its clock is {off_s:.1f} s {where} Redis's",
            "set it, or have it kept by NTP; calls go by Redis's",
        )
