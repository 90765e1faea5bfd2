"""A user's Celery application, with a worker of its own."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from celery import Celery

ROOT = Path(__file__).resolve().parents[3]
URL = os.environ.get("SHOP_BROKER", "memory://")
app = Celery("shop", broker=URL, backend=URL if URL.startswith("redis") else "cache+memory://")
app.conf.update(
    include=["toolcrew.celery"],
    task_routes={"shop.routed": {"queue": "other"}},
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    worker_send_task_events=False,
    result_expires=3600,
)


def _mark(name: str) -> int:
    """Count one run of a task in a file, and return the count."""
    with (Path(os.environ["SHOP_FOLDER"]) / name).open("a+") as file:
        file.write(f"{os.getpid()}\n")
        file.flush()
        file.seek(0)
        return len(file.readlines())


@app.task(name="shop.add")
def add(first: int, second: int = 2) -> int:
    """Add two numbers.

    Args:
        first: the first number
    """
    _mark("add")
    return first + second


@app.task(name="shop.fail")
def fail(text: str) -> None:
    """Fail with a text."""
    raise LookupError(text)


@app.task(name="shop.flaky", bind=True, max_retries=3)
def flaky(self: Any) -> str:
    """Succeed in the third attempt."""
    if _mark("flaky") < 3:
        raise self.retry(countdown=0)
    return "third"


@app.task(name="shop.routed", bind=True)
def routed(self: Any) -> str:
    """Return the queue of the task."""
    return str(self.request.delivery_info["routing_key"])


@app.task(name="shop.slow")
def slow(name: str) -> None:
    """Run until the task is revoked."""
    _mark(name)
    time.sleep(600)


@app.task(name="shop.limited", time_limit=1)
def limited() -> None:
    """Run longer than the limit of the task."""
    time.sleep(600)


@app.task(name="shop.collect", ignore_result=False)
def collect(runs: list[dict[str, Any]]) -> list[str]:
    """Return the answers of runs."""
    return [str(run["answer"]) for run in runs]


@contextlib.contextmanager
def running_worker(url: str, folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[int]:
    """Run a worker of the application with two processes. Yield its pid."""
    argv = [sys.executable, "-m", "celery", "-A", "tests.support.stack.celery_shop", "worker"]
    argv += ["--concurrency=2", "--queues=celery,other", "--loglevel=INFO", "--without-mingle", "--without-gossip"]
    variables = {**os.environ, "SHOP_BROKER": url, "SHOP_FOLDER": str(folder), **(environment or {})}
    with (folder / "worker.log").open("wb") as log:
        worker = subprocess.Popen(argv, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield worker.pid
        finally:
            worker.terminate()
            try:
                worker.wait(10)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()


def connect(url: str) -> Celery:
    """Return the application on another broker, for a program that sends tasks."""
    app.conf.update(broker_url=url, result_backend=url)
    return app
