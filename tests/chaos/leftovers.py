"""Find leftovers on a harness after all orchestrators have ended: open calls, held slots, messages and sandboxes."""

from pathlib import Path
from typing import Any

import redis

from tests.support.stack.host_harness import Harness
from toolcrew.contract.hosts import HostReport, parse_holder
from toolcrew.contract.names import admission_prefix, control_queue, host_key

OPEN_STATES = (b"queued", b"running")
_SHOWN = 10


def find_leftovers(harness: Harness) -> dict[str, Any]:
    """Return the leftovers by kind; empty if nothing is left."""
    found: dict[str, Any] = {"containers": harness.footprint.containers()}
    try:
        with harness.open_redis() as client:
            found |= _in_redis(client, harness.deployment, has_orphans=harness.has_orphans)
    except redis.RedisError as error:
        found["redis"] = str(error)
    return {kind: names for kind, names in found.items() if names}


def find_mounts(folder: Path) -> dict[str, Any]:
    """Return the mounts and loop devices below a folder."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if f"{folder}/" in line]
    loops = []
    for device in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            backing = device.read_text().strip()
        except OSError:
            continue  # removed in the meantime
        if backing.startswith(f"{folder}/"):
            loops.append(backing)
    return {kind: names for kind, names in {"mounts": mounts, "loops": loops}.items() if names}


def _in_redis(client: "redis.Redis", deployment: str, *, has_orphans: bool) -> dict[str, Any]:
    keys = [key.decode() for key in client.scan_iter(count=1000)]
    # Lists that are read at once expire by themselves when no reader is left.
    queues = [key for key in keys if key.startswith(("host.", "pool.")) and not key.endswith(control_queue(""))]
    return {
        "calls": _open_calls(
            client, deployment, [key for key in keys if is_call(key.encode())], has_orphans=has_orphans
        ),
        "messages": {queue: length for queue in queues if (length := client.llen(queue))},
        "slots": _held_slots(client, deployment),
    }


def _held_slots(client: "redis.Redis", deployment: str) -> list[str]:
    """Return the calls that hold or wait for a slot of admission."""
    return sorted(
        key.decode() for name in ("held", "waiting") for key in client.hkeys(admission_prefix(deployment) + name)
    )[:_SHOWN]


def is_call(key: bytes) -> bool:
    """Return whether a key is the record of a call, and not its events."""
    return b":t:" in key and key.rpartition(b":")[2].startswith(b"call.")


def _open_calls(client: "redis.Redis", deployment: str, keys: list[str], *, has_orphans: bool) -> dict[str, str]:
    """Return the records of calls that have not ended. `has_orphans`: orchestrators were killed. If the worker
    of a call was killed as well, the end of the call is not recorded. The record then names the old owner until the
    record expires.
    """
    records: dict[str, dict[bytes, bytes]] = {key: client.hgetall(key) for key in keys}
    is_open = [key for key, record in records.items() if record.get(b"state") in OPEN_STATES]
    # Without killed orchestrators every open record is a failure. With killed orchestrators only a record with a
    # living owner is a failure.
    leftovers = [key for key in is_open if not has_orphans or _is_held(client, deployment, records[key])]
    return {
        key: b" ".join(b"%s=%s" % field for field in records[key].items()).decode(errors="replace")
        for key in leftovers[:_SHOWN]
    }


def _is_held(client: "redis.Redis", deployment: str, record: dict[bytes, bytes]) -> bool:
    """Return whether the owner of the call lives: the worker that runs the call, or the worker that reads its queue."""
    queue, worker = parse_holder(record.get(b"holder", record[b"queue"]).decode())
    report = client.get(host_key(deployment, queue))
    if not isinstance(report, bytes):
        return False
    living = HostReport.model_validate_json(report)
    # Several web workers may serve one queue, so the report need not name the worker of this call.
    return living.kind == "web" or not worker or living.worker == worker
