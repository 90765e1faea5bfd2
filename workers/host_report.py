"""What a worker tells of itself, put together from its settings, its sandboxd's status, and the machine's memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from contract.hosts import MAX_TROUBLE_CHARS, HostReport

_MEMINFO = Path("/proc/meminfo")


def build_host_report(status: Mapping[str, Any], *, is_silent: bool, **fields: Any) -> HostReport:
    """Of a worker beside a sandboxd. `fields`: those that the worker itself knows; too long a trouble is shortened."""
    trouble = str(fields.pop("trouble", "sandboxd does not answer: see its log" if is_silent else ""))
    facts: dict[str, Any] = {
        "sessions": _count(status, "sessions"),
        "max_sessions": _count(status, "max_sessions"),
        "sandboxes": _count(status, "sandboxes"),
        "max_sandboxes": _count(status, "max_sandboxes"),
        "memory_free_bytes": _count(status, "memory_free_bytes") or find_free_memory(),
        "disk_free_bytes": _count(status, "disk_free_bytes"),
        "classes": _names(status, "classes"),
        "images": _names(status, "images"),
        "store": read_store(status),
        "healthy": not is_silent,
        "trouble": trouble if len(trouble) <= MAX_TROUBLE_CHARS else f"{trouble[: MAX_TROUBLE_CHARS - 1]}…",
    }
    return HostReport.model_validate({"kind": "sandbox", "reported_at": 0.0, **facts, **fields})


def build_pool_report(**fields: Any) -> HostReport:
    """Of a worker without sandboxes."""
    return HostReport.model_validate({"kind": "web", "reported_at": 0.0, "memory_free_bytes": find_free_memory(), **fields})


def read_store(status: Mapping[str, Any]) -> Literal["local", "shared"]:
    """Where a sandboxd's checkpoints go; one that does not say keeps them to itself."""
    return "shared" if status.get("store") == "shared" else "local"


def find_free_memory() -> int:
    """Bytes that programs could have without swapping, as the kernel estimates it."""
    for line in _MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0


def _count(status: Mapping[str, Any], name: str) -> int:
    value = status.get(name)
    return max(0, value) if isinstance(value, int) else 0


def _names(status: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = status.get(name)
    return tuple(str(item) for item in value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
