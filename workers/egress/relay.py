"""Bytes between a client and a host, both ways at once, watched from beside."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from workers.egress.allowances import Allowance
from workers.egress.hellos import HelloGate
from workers.egress.limits import ProxyLimits
from workers.egress.streams import Stream
from workers.egress.verdicts import Verdict, bad_gateway

Work = Coroutine[Any, Any, None]


class Pulse:
    """When something last moved on a connection, and since when there is one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at = self._moved_at = clock()

    def beat(self) -> None:
        self._moved_at = self._clock()

    @property
    def idle_s(self) -> float:
        return self._clock() - self._moved_at

    @property
    def age_s(self) -> float:
        return self._clock() - self._began_at


async def watch(client: Stream, pulse: Pulse, limits: ProxyLimits) -> None:
    """Never ends by itself. Raises Refusal when the connection is idle, too old, or left by its client."""
    while True:
        await asyncio.sleep(min(limits.watch_s, limits.idle_s / 4, limits.total_s / 4))
        if client.is_ended and client.is_left():
            raise bad_gateway(Verdict.BROKEN_OFF, "the client left")
        if pulse.idle_s >= limits.idle_s:
            raise bad_gateway(Verdict.IDLE, f"nothing came or went for {limits.idle_s:g} s: try again")
        if pulse.age_s >= limits.total_s:
            raise bad_gateway(
                Verdict.TOO_LONG, f"a connection lasts {limits.total_s:g} s at most: go on with another one"
            )


async def run_all(*works: Work, beside: tuple[Work, ...] = ()) -> None:
    """Returns when all `works` have ended; what runs `beside` is cancelled then. Raises what the first to fail raises,
    the rest cancelled.
    """
    needed = {asyncio.ensure_future(work) for work in works}
    every = needed | {asyncio.ensure_future(work) for work in beside}
    try:
        running = set(every)
        while needed & running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in every:
            task.cancel()
        await asyncio.gather(*every, return_exceptions=True)


async def tunnel(
    client: Stream, host: Stream, gate: HelloGate, first: bytes, allowance: Allowance, pulse: Pulse
) -> None:
    """Until both sides have ended; the end of one is handed on. `first`: what the client has sent already. Raises
    Refusal, OSError.
    """
    await run_all(_send_up(client, host, gate, first, allowance, pulse), _send_down(client, host, allowance, pulse))


async def _send_up(
    client: Stream, host: Stream, gate: HelloGate, first: bytes, allowance: Allowance, pulse: Pulse
) -> None:
    while data := first or await client.receive(allowance):
        first = b""
        pulse.beat()
        passed = gate.pass_on(data)
        try:
            await host.send(passed)
        except OSError:
            return  # it reads no more; what it said before that is still the client's to hear
        pulse.beat()
    gate.finish()
    host.end_sending()


async def _send_down(client: Stream, host: Stream, allowance: Allowance, pulse: Pulse) -> None:
    while data := await host.receive(allowance):
        pulse.beat()
        await client.send(data)
        pulse.beat()
    client.end_sending()
