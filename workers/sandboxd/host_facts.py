"""What this host says of itself below /proc and /sys, as far as promises hang on it. What cannot be read is None: not known, never assumed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HostFacts:
    """Sizes in bytes."""

    kernel: str | None = None
    swaps: tuple[str, ...] | None = None
    """Devices and files that are swapped to."""
    overcommit: int | None = None
    """vm.overcommit_memory: 0 by guess, 1 always, 2 never."""
    memory_bytes: int | None = None
    available_bytes: int | None = None
    inotify_instances: int | None = None
    inotify_watches: int | None = None
    smt_active: bool | None = None
    ksm_running: bool | None = None
    lsm: frozenset[str] | None = None


def read_host_facts(root: Path = Path("/")) -> HostFacts:
    """Reads a few small files; raises nothing."""
    memory = _parse_meminfo(_read(root / "proc/meminfo") or "")
    lsm = _read(root / "sys/kernel/security/lsm")
    smt = _read_number(root / "sys/devices/system/cpu/smt/active")
    ksm = _read_number(root / "sys/kernel/mm/ksm/run")
    return HostFacts(
        kernel=_read(root / "proc/sys/kernel/osrelease"),
        swaps=_parse_swaps(_read(root / "proc/swaps")),
        overcommit=_read_number(root / "proc/sys/vm/overcommit_memory"),
        memory_bytes=memory.get("MemTotal"),
        available_bytes=memory.get("MemAvailable"),
        inotify_instances=_read_number(root / "proc/sys/fs/inotify/max_user_instances"),
        inotify_watches=_read_number(root / "proc/sys/fs/inotify/max_user_watches"),
        smt_active=None if smt is None else bool(smt),
        ksm_running=None if ksm is None else ksm == 1,
        lsm=None if lsm is None else frozenset(lsm.split(",")),
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _read_number(path: Path) -> int | None:
    text = _read(path) or ""
    return int(text) if text.isascii() and text.isdigit() else None


def _parse_swaps(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(line.split()[0] for line in text.splitlines()[1:] if line.strip())


def _parse_meminfo(text: str) -> Mapping[str, int]:
    """Of lines as `MemTotal: 16303044 kB`."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isascii() and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found
