"""The setup of logs of services, in separate processes: one format for our events, libraries, warnings and uncaught
exceptions.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.stack.log_lines import read_events

SECRET = "correct-horse-battery-staple"

WORKERS = """
from toolcrew.workers.logs import configure_logging
from toolcrew.contract.settings import WorkerSettings, read_environment
import structlog
configure_logging("worker", read_environment(WorkerSettings))
log = structlog.get_logger("x")
"""
ORCHESTRATOR = """
from toolcrew.orchestrator.logs import configure_logging
from toolcrew.telemetry.logs import get_logger
from toolcrew.contract.settings import load_settings
configure_logging(load_settings(), "orchestrator")
log = get_logger("toolcrew.orchestrator.x")
"""
SIDES = pytest.mark.parametrize("side", [WORKERS, ORCHESTRATOR], ids=["workers", "orchestrator"])


def run_program(side: str, code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    settings = {
        "TOOLCREW_REDIS_URL": "redis://:url-password-1@127.0.0.1:1/0",
        "TOOLCREW_SECRET": SECRET,
        "PYTHONSAFEPATH": "",
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", side + code], env=settings, capture_output=True, text=True, check=False, timeout=60
    )


def run_and_read_events(side: str, code: str, **environment: str) -> list[dict[str, Any]]:
    return read_events(run_program(side, code, **environment).stderr)


@SIDES
def test_events_contain_bound_fields_and_no_secret(side: str) -> None:
    code = f"""
import structlog
with structlog.contextvars.bound_contextvars(tenant="acme", call="c-1"):
    log.warning("call_lost", error="redis://:url-password-1@h/0 {SECRET}", token="t")
log.info("said"); log.debug("unsaid")
"""
    lost, done = run_and_read_events(side, code)
    assert lost["level"] == "warning"
    assert lost["event"] == "call_lost"
    assert lost["tenant"] == "acme"
    assert lost["call"] == "c-1"
    assert lost["token"] == "[masked: token]"
    assert SECRET not in lost["error"]
    assert "url-password-1" not in lost["error"]
    assert (done["event"], "tenant" in done) == ("said", False)


@SIDES
def test_library_warnings_and_uncaught_exceptions_are_log_events(side: str) -> None:
    code = """
import logging, threading, warnings
logging.getLogger("some.library").warning("two\\nlines")
logging.getLogger("some.library").info("unsaid")
warnings.warn("old habit")
thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()
try:
    {}["k"]
except KeyError:
    log.exception("tool_bug")
raise ValueError("the end")
"""
    events = run_and_read_events(side, code)
    assert [event["event"] for event in events] == [
        "library_message",
        "library_message",
        "thread_failed",
        "tool_bug",
        "process_failed",
    ]
    assert events[0]["logger"] == "some.library"
    assert events[0]["message"] == "two\\nlines"
    assert events[1]["logger"] == "py.warnings"
    assert [event["exception"] for event in events[2:]] == [
        "ZeroDivisionError: division by zero",
        "KeyError: 'k'",
        "ValueError: the end",
    ]


@SIDES
def test_log_level_setting_applies(side: str) -> None:
    events = run_and_read_events(side, 'log.debug("one", a="b c"); log.info("two")', TOOLCREW_LOG_LEVEL="debug")
    assert [(event["level"], event["event"]) for event in events] == [("debug", "one"), ("info", "two")]
    assert run_and_read_events(side, 'log.info("two")', TOOLCREW_LOG_LEVEL="ERROR") == []


def test_sdk_does_not_change_the_logging_of_a_program() -> None:
    code = """
import json, logging, orchestrator
from toolcrew.telemetry.logs import get_logger
log = get_logger("toolcrew.orchestrator.x")
log.info("unsaid"); log.warning("call_lost", call="c")
print(json.dumps([logging.getLogger().handlers, logging.getLogger("toolcrew").handlers, logging.getLogger("toolcrew").level]))
"""
    done = run_program("", code)
    assert (json.loads(done.stdout), done.stderr) == ([[], [], 0], "event=call_lost call=c\n")


def test_concurrent_processes_and_threads_write_whole_lines() -> None:
    code = """
import os, threading
pids = [os.fork() for _ in range(2)]
def talk():
    for number in range(200):
        log.info("tool_printed", text="x" * 1800, number=number)
threads = [threading.Thread(target=talk) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
if pids[-1] and pids[0]:
    for pid in pids: os.waitpid(pid, 0)
else:
    os._exit(0)
"""
    assert len(run_and_read_events(WORKERS, code)) >= 3 * 3 * 200
