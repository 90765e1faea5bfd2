"""What a worker answers on Celery's control channel: what Flower's pages and a health check ask, and nothing that changes the worker.

Redis 6.2 cannot tell who may listen on a channel from who may publish there, so every worker and Flower can broadcast. Draining, and ending a
call, have signed orders of their own (workers/control.py).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import structlog
from celery.worker.control import Panel

log = structlog.get_logger(__name__)

ANSWERED = frozenset(
    {"active", "active_queues", "conf", "enable_events", "heartbeat", "ping", "registered", "reserved", "revoked", "scheduled", "stats"}
)
"""enable_events, heartbeat: Flower sends them; ours are always on, and answering harms nobody."""
_BROKER_FACTS = frozenset({"hostname", "port", "transport", "userid", "virtual_host"})


def restrict_remote_control() -> None:
    """Have this process refuse every other command, whoever sends it, and log that it was sent."""
    stats = Panel.data["stats"]
    for name in Panel.data.keys() - ANSWERED:
        Panel.data[name] = partial(_refuse, name)
    Panel.data["stats"] = partial(_tell_stats, stats)


def _refuse(name: str, state: Any, **_: Any) -> Mapping[str, str]:
    log.warning("remote_control_refused", command=name)
    return {"error": f"{name} is not served here: use `toolcrew worker drain HOST`, or cancel the call"}


def _tell_stats(stats: Any, state: Any, **arguments: Any) -> Mapping[str, Any]:
    """Celery's, without what bears passwords behind sentinels: the list of addresses, and the options of the transport."""
    told = dict(stats(state, **arguments))
    broker = told.get("broker") or {}
    return {**told, "broker": {name: value for name, value in broker.items() if name in _BROKER_FACTS}}
