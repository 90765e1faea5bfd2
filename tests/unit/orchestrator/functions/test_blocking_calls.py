"""Interrupting functions in threads: the function ends, and nothing that runs later in its thread notices."""

import asyncio
import subprocess
import sys

from tests.support.stack.stack import ROOT
from tests.support.stack.waiting import SOON_S
from toolcrew.orchestrator.functions.blocking_calls import BlockingCalls, FunctionInterrupted

ROUNDS = 300


async def test_an_interrupt_never_affects_the_next_function_of_the_thread() -> None:
    threads = BlockingCalls(limit=1)
    async with asyncio.timeout(60):
        for number in range(ROUNDS):
            steps = iter(range(number * 10))
            interrupted = threads.submit(lambda steps=steps: sum(steps))
            await interrupted.started
            interrupted.interrupt()
            ended = await interrupted.ended
            assert ended.error is None or isinstance(ended.error, FunctionInterrupted)
            after = threads.submit(lambda: sum(range(200)))
            assert (await after.ended).value == 19_900


async def test_a_function_that_ended_before_the_interrupt_keeps_its_value() -> None:
    call = BlockingCalls().submit(lambda: "done")
    async with asyncio.timeout(SOON_S):
        ended = await call.ended
    call.interrupt()
    assert (ended.value, ended.error) == ("done", None)


TRACED_PROGRAM = """
import asyncio, sys, threading
from toolcrew.orchestrator.functions.blocking_calls import BlockingCalls

def trace(*_):
    return trace

async def main():
    calls = BlockingCalls(limit=1)
    print([(await calls.submit(lambda: number).ended).value for number in range(3)])

threading.settrace(trace)
sys.settrace(trace)
asyncio.run(main())
"""


def test_functions_run_under_a_tracer_such_as_coverage() -> None:
    """The tests of an operator's tools hung under coverage."""
    ran = subprocess.run([sys.executable, "-c", TRACED_PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert ran.stdout == "[0, 1, 2]\n", ran.stderr
