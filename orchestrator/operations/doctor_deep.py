"""Check of `toolcrew doctor --deep`: a real signed call on each host. The call tests the signing secret, the path
through Redis, the sandbox and the clock of the host.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.errors import OperatorError, ToolcrewError, ToolFailure
from toolcrew.contract.hosts import HostReport
from toolcrew.contract.metrics import REFUSALS
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection, open_pool
from toolcrew.orchestrator.operations.findings import Report
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store.clock import SKEW_WARNING_S, read_clock

HOST_S = 90.0
"""Time limit for one host, in seconds. The host may have to create a sandbox, and it may be busy."""
AT_ONCE = 4
QUEUE_WAIT_S = 30.0
SESSION_TTL_S = 120.0
"""Seconds after which the host removes the session if it is not closed."""


async def examine_hosts(broker: BrokerSettings, reports: Sequence[HostReport], report: Report) -> None:
    """Open a session on each sandbox host that serves, run one program in it, and close it. The calls belong to the
    default tenant.
    """
    able = [host for host in reports if host.kind == "sandbox" and host.state == "serving"]
    if not able:
        report.add_warning(
            "calls",
            "no sandbox host serves, so no call was made",
            "start one: `toolcrew serve worker` next to a sandboxd",
        )
    semaphore = asyncio.Semaphore(AT_ONCE)
    # The report has the order of the hosts, no matter which check ends first.
    for result in await asyncio.gather(*(_check_host(broker, host, semaphore) for host in able)):
        report.findings += result.findings


@dataclass(frozen=True)
class _OnlyHost:
    """HostSource that returns only the report of one host."""

    only: HostReport

    async def reports(self) -> list[HostReport]:
        return [self.only]

    async def silent(self) -> list[str]:
        return []


async def _check_host(broker: BrokerSettings, host: HostReport, semaphore: asyncio.Semaphore) -> Report:
    report, name = Report(), host.host
    async with semaphore:
        try:
            async with (
                asyncio.timeout(HOST_S),
                open_pool(broker, queue_wait_s=QUEUE_WAIT_S, hosts=_OnlyHost(host)) as pool,
            ):
                await _call(pool, name, report)
        except TimeoutError:
            report.add_failure(
                "calls", f"{name}: no answer within {HOST_S:g} s", f"see the logs of worker and sandboxd on {name}"
            )
        except ToolFailure as failure:
            _report_failure(name, failure, report)
        except OperatorError as error:
            report.add_failure(
                "calls", f"{name}: {error}", f"set the same TOOLCREW_SECRET on both sides, or see the logs on {name}"
            )
        except ToolcrewError as error:
            report.add_failure("calls", f"{name}: {error}", f"see the logs of worker and sandboxd on {name}")
    return report


def _report_failure(name: str, failure: ToolFailure, report: Report) -> None:
    if failure.code.value not in REFUSALS:
        report.add_failure(
            "calls",
            f"{name}: {failure.message}",
            f"set the same TOOLCREW_SECRET on both sides, or see the logs on {name}",
        )
    else:
        report.add_warning(
            "calls",
            f"{name}: the default tenant may not make this call ({failure.message})",
            "allow it, or test with `toolcrew call TOOL --tenant TENANT`",
        )


async def _call(pool: PoolConnection, name: str, report: Report) -> None:
    began = time.monotonic()
    async with await Session.open(
        pool.dispatcher, pool.blobs, tenant=DEFAULT_TENANT, spec=SessionSpec(ttl_s=SESSION_TTL_S)
    ) as session:
        opened_s = time.monotonic() - began
        before = await read_clock(pool.redis)
        done = await session.exec(["date", "+%s.%N"], timeout_s=10)
        after = await read_clock(pool.redis)
    if done.returncode != 0:
        report.add_failure(
            "calls",
            f"{name}: `date` ended with {done.returncode} in a sandbox",
            "rebuild its image (scripts/build-image)",
        )
        return
    report.add_passed(
        "calls",
        f"{name}: a signed call was answered in {after - before:.3f} s, in a session opened in {opened_s:.2f} s",
    )
    judge_clock(name, done.stdout, before, after, report)


def judge_clock(name: str, output: bytes, before: float, after: float, report: Report) -> None:
    """Compare the sandbox's clock, which is its host's clock, with Redis's clock. The output of a guest is not
    trusted.
    """
    try:
        sandbox_time = float(output[:40])
    except ValueError:
        report.add_warning(
            "clock", f"{name}: a sandbox did not print the time", "check the program `date` of its image"
        )
        return
    off_s = max(before - sandbox_time, sandbox_time - after, 0.0)
    if not off_s < SKEW_WARNING_S:
        direction = "behind" if sandbox_time < before else "ahead of"
        report.add_warning(
            "clock",
            f"{name}: its clock is {off_s:.1f} s {direction} Redis's",
            "correct it, or use NTP; calls use Redis's clock",
        )
