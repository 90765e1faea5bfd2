"""The cgroup's own count of OOM kills, and who is to die first."""

from __future__ import annotations

import os

_COUNTERS = (
    b"/sys/fs/cgroup/memory/memory.oom_control",
    b"/sys/fs/cgroup/memory.events",
    b"/sys/fs/cgroup/memory.events.local",
)


def read_oom_kills(paths: tuple[bytes, ...] = _COUNTERS) -> int | None:
    """The counter in the first of the files that has one, None where there is none."""
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            count = _parse_oom_kills(os.read(fd, 4096))
        except OSError:
            count = None
        finally:
            os.close(fd)
        if count is not None:
            return count
    return None


_OFFER = b"200"
"""A fifth of the container's memory: more than the guest ever has. With more, a hog that takes its own offer back, as it may, would
outlive every small program beside it."""


def offer_to_oom_killer(pid: int) -> None:
    """Let a program and what it starts be killed before the guest: a killed guest costs the sandbox, not the call."""
    try:
        fd = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(fd, _OFFER)
    except OSError:
        # The program may be gone already; without the mark it is merely not preferred.
        return
    finally:
        os.close(fd)


def _parse_oom_kills(text: bytes) -> int | None:
    for line in text.splitlines():
        name, _, value = line.partition(b" ")
        if name == b"oom_kill" and value.isdigit():
            return int(value)
    return None
