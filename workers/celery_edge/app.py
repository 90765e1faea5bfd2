"""The Celery app of a worker: its settings, its node name, and the start of the worker."""

import hashlib
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import structlog
from celery import Celery
from celery.apps import worker as program
from celery.signals import setup_logging, worker_process_shutdown, worker_ready, worker_shutdown, worker_shutting_down
from celery.worker import state
from celery.worker.control import Panel

from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.errors import ConfigError, RefusalReason
from toolcrew.workers.celery_edge.broker import DUPLICATE_FILTER, DuplicateFilter, LiveTasks, register_transport
from toolcrew.workers.celery_edge.tasks import BACKENDS

log = structlog.get_logger(__name__)

EXIT_RESTART = 75
"""Exit code of a worker that must be started again: it was declared lost, or its sandboxd has restarted."""
MAX_NAMESAKES = 100
"""Maximum number of workers with the same name on one machine."""
_node_sockets: list[socket.socket] = []
"""Sockets that reserve the node names of this process. They stay open until the process ends."""
_LOGGERS = ("celery.worker.consumer.consumer", "kombu.transport.redis")
_FUNCTIONS = frozenset(
    {"on_unknown_message", "on_unknown_task", "on_invalid_task", "on_decode_error", "_do_restore_message"}
)
"""Functions of Celery's consumer and of kombu's channel that log a whole message.

A message may contain a tenant's call.
"""
ANSWERED_COMMANDS = frozenset(
    {
        "active",
        "active_queues",
        "conf",
        "enable_events",
        "heartbeat",
        "ping",
        "registered",
        "reserved",
        "revoked",
        "scheduled",
        "stats",
    }
)
"""Commands of Celery's control channel that Flower and health checks send.

Flower sends enable_events and heartbeat, but the events of a worker are always on.
"""
_BROKER_FACTS = frozenset({"hostname", "port", "transport", "userid", "virtual_host"})
Pool = Literal["threads", "prefork"]


def count_running() -> int:
    """Return the number of calls that have started in the pool's processes or threads."""
    return len(state.active_requests)


def find_sessions_at_work() -> set[str]:
    """Return the sessions (`<tenant>:<session>`) with a call that has left the queue and has not ended, even if its
    execution has not begun.
    """
    # `list` copies the requests in one step of the interpreter, because the main thread may change the collection at
    # any time.
    requests = list(state.requests.values())
    return {name for name in (parse_session_of(request.kwargs) for request in requests) if name is not None}


def parse_session_of(arguments: Any) -> str | None:
    """Return the session in the arguments of a task; None without a session. The signature is not checked yet."""
    try:
        context = json.loads(arguments["envelope"].split(".", 3)[3])["context"]
        return f"{context['tenant']}:{context['session']}" if context.get("session") else None
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def end_worker(code: int, *, within_s: float | None = None) -> None:
    """Stop taking calls, wait for the running calls, then end the process with exit code `code`.

    With `within_s` the process ends after this many seconds even if calls are running.
    """
    if within_s is not None:
        # A result is retried while Redis does not answer, and a blocked call does not end. Neither may delay the end of
        # the process.
        timer = threading.Timer(within_s, os._exit, (code,))
        timer.daemon = True
        timer.start()
    state.should_stop = code  # type: ignore[assignment]  # Celery: None, or the exit code


def on_stopping(callback: Callable[[], None]) -> None:
    """Register `callback` for the start of the worker's shutdown.

    `callback` must not take a lock, because it may run in a signal handler.
    """

    def handle(**_: Any) -> None:
        callback()

    worker_shutting_down.connect(handle, weak=False)


POOL_OF_KIND: Mapping[Literal["sandbox", "web"], Pool] = MappingProxyType({"sandbox": "threads", "web": "prefork"})
"""Kind of worker -> Celery pool. Sandboxes enforce the limits of calls in threads.

Without a sandbox, only a kill of the process ends a tool at its limit.
"""


def build_app(broker: BrokerSettings, on_refused: Callable[[RefusalReason], None] | None = None) -> Celery:
    """Return an app without tasks. `on_refused` receives the reason when a queue contains an invalid message.

    docs/design.md explains each setting.
    """
    register_transport()
    broker_options = broker.celery_options()
    transport_options = broker_options.pop("broker_transport_options")
    # Celery accepts an instance of a registry as well as a class, but Celery's type hints allow only the class.
    app = Celery("toolcrew", set_as_current=False, tasks=LiveTasks())  # type: ignore[arg-type]
    app.loader.override_backends = BACKENDS
    app.conf.update(
        **broker_options,
        # At most once: a tool may have acted, so only the orchestrator sends a call again, never the broker.
        task_acks_late=False,
        task_reject_on_worker_lost=False,
        worker_disable_prefetch=True,
        worker_prefetch_multiplier=1,
        # A result must survive a restart of Redis. Without retries, an error also blocks the pool's slot forever.
        result_backend_always_retry=True,
        result_backend_max_retries=600,
        result_backend_max_sleep_between_retries_ms=1000,
        result_expires=3600,
        task_ignore_result=False,
        task_track_started=False,
        # JSON only: a process that can write to the queue must not choose what is unpickled.
        task_serializer="json",
        result_serializer="json",
        event_serializer="json",
        accept_content=["json"],
        result_accept_content=["json"],
        worker_send_task_events=True,
        worker_consumer="toolcrew.workers.celery_edge.broker:BatchingConsumer",
        task_send_sent_event=False,
        worker_max_memory_per_child=256 * 1024,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_channel_error_retry=True,
        broker_pool_limit=10,
        broker_pool_acquire_timeout=5,
        task_create_missing_queues=True,
        broker_transport_options={
            **transport_options,
            DUPLICATE_FILTER: DuplicateFilter(on_refused),
            # The transport keeps no list of unacknowledged messages (workers/celery_edge/broker.py), so kombu has
            # nothing to restore.
            "unacked_restore_interval": 3600,
            "priority_steps": [0],
            "queue_order_strategy": "round_robin",
            "socket_timeout": 10,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 15,
        },
        redis_socket_timeout=10,
        redis_socket_connect_timeout=5,
        redis_socket_keepalive=True,
        redis_backend_health_check_interval=15,
    )
    return app


def reserve_node_name(name: str, broker: BrokerSettings) -> str:
    """Return a unique Celery node name for this process: `name`@<machine>.

    A second worker on the same machine with the same broker gets `name`-2@<machine>, because Flower merges workers
    with the same name. A name is free again when its process has ended.

    Raises ConfigError: 100 workers have the name.
    """
    machine, url = socket.gethostname(), broker.redis_address()
    for number in range(1, MAX_NAMESAKES + 1):
        node = f"{name}@{machine}" if number == 1 else f"{name}-{number}@{machine}"
        digest = hashlib.sha256(f"{url} {broker.deployment} {node}".encode()).hexdigest()
        holder = socket.socket(socket.AF_UNIX)
        try:
            # An abstract address: the kernel frees it when the process ends for any reason.
            holder.bind(f"\0toolcrew-node-{digest}")
        except OSError:
            holder.close()
        else:
            _node_sockets.append(holder)
            return node
    raise ConfigError(
        f"{MAX_NAMESAKES} workers on this machine are named {name}: set a different name in TOOLCREW_HOST"
    )


def run_celery_worker(
    app: Celery,
    node: str,
    queues: Sequence[str],
    concurrency: int,
    log_level: str,
    *,
    pool: Pool = "prefork",
    on_ready: Callable[[], None],
    on_stop: Callable[[], None],
    on_process_stop: Callable[[], None] = lambda: None,
) -> None:
    """Run the Celery node `node` on these queues until it receives a stop signal.

    `on_ready` runs when the worker consumes, `on_stop` at its end, and `on_process_stop` at the end of each process
    of a prefork pool. The process ends when Celery requests an exit code other than 0.
    """
    _restrict_remote_control()
    _hide_bodies()
    replace_celery_output()
    worker_ready.connect(lambda **_: on_ready(), weak=False)
    worker_shutdown.connect(lambda **_: on_stop(), weak=False)
    worker_process_shutdown.connect(lambda **_: on_process_stop(), weak=False)
    # Start the worker directly. The command `celery worker` also loads Celery's whole command line and Flower's,
    # which costs time and memory.
    worker = app.Worker(
        hostname=node,
        queues=",".join(queues),
        pool_cls=pool,
        concurrency=concurrency,
        optimization="fair",
        without_gossip=True,
        without_mingle=True,
        task_events=True,
        loglevel=log_level,
        quiet=True,
    )
    worker.start()
    if worker.exitcode:
        sys.exit(worker.exitcode)


def replace_celery_output() -> None:
    """Prevent Celery from configuring its own logging.

    Log the message that Celery writes when it receives a stop signal.
    """
    setup_logging.connect(lambda **_: None, weak=False)

    def log_signal(message: object, _: object = None) -> None:
        log.info("stop_signal_received", message=str(message))

    setattr(program, "safe_say", log_signal)  # noqa: B010  # no part of Celery's types


class BodyFilter(logging.Filter):
    """Log filter: replaces the log line of a function in _FUNCTIONS, which contains a message body, with the function's
    name and the error.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.funcName in _FUNCTIONS:
            error = record.exc_info[1] if record.exc_info else None
            reason = f"{type(error).__name__}: {error}"[:200] if error is not None else "its body is not shown"
            record.msg, record.args, record.exc_info = (
                "a message was refused by %s (%s)",
                (record.funcName, reason),
                None,
            )
        return True


def _hide_bodies() -> None:
    """Install the filter for the whole process."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(BodyFilter())


def _restrict_remote_control() -> None:
    """Make this process refuse and log every Celery control command that changes a worker.

    Redis 6.2 cannot separate the permission to listen on a channel from the permission to publish. So every worker and
    Flower can send control commands to all workers. Drains and cancels have their own signed orders
    (workers/control.py).
    """
    stats = Panel.data["stats"]
    for name in Panel.data.keys() - ANSWERED_COMMANDS:
        Panel.data[name] = partial(_refuse_command, name)
    Panel.data["stats"] = partial(_build_stats, stats)


def _refuse_command(name: str, _state: Any, **_: Any) -> Mapping[str, str]:
    log.warning("remote_control_refused", command=name)
    return {"error": f"{name} is not served here: use `toolcrew hosts drain HOST`, or cancel the call"}


def _build_stats(stats: Any, state: Any, **arguments: Any) -> Mapping[str, Any]:
    """Return Celery's statistics without the fields that may contain passwords: the addresses and the options of the
    transport.
    """
    fields = dict(stats(state, **arguments))
    broker = fields.get("broker") or {}
    return {**fields, "broker": {name: value for name, value in broker.items() if name in _BROKER_FACTS}}
