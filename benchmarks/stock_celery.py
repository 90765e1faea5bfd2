"""The peer in the comparison of calls: a Celery app as Celery's documentation shows it, with the JSON serializer and
task events.

`python -m celery -A benchmarks.stock_celery worker` runs its worker. REDIS_URL names the broker and result backend.
"""

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from celery import Celery
from celery.result import AsyncResult

from benchmarks.processes import child_process

QUEUE = "stock"
_URL = "REDIS_URL"

app = Celery("stock", broker=os.environ.get(_URL), backend=os.environ.get(_URL))
app.conf.task_default_queue = QUEUE


@app.task
def noop() -> None:
    """Do nothing."""


@contextlib.contextmanager
def open_stock(url: str, slots: int, folder: Path) -> Iterator[None]:
    """Run the worker, and connect this process to it. The block begins when the worker answers."""
    app.conf.update(broker_url=url, result_backend=url)
    options = ["-c", str(slots), "-P", "prefork", "-E", "-l", "WARNING"]
    argv = [sys.executable, "-m", "celery", "-A", "benchmarks.stock_celery", "worker", *options]
    with child_process(argv, {_URL: url}, folder / "stock.log"), contextlib.closing(app):
        noop.delay().get(timeout=30)
        yield


def stock_per_second(calls: int, in_flight: int) -> float:
    """Return the calls per second of `delay` and `get`, with `in_flight` calls at a time."""
    waiting: deque[AsyncResult[None]] = deque()
    started = time.perf_counter()
    for number in range(calls + in_flight):
        if number >= in_flight and waiting:
            waiting.popleft().get(timeout=30)
        if number < calls:
            waiting.append(noop.delay())
    return calls / (time.perf_counter() - started)
