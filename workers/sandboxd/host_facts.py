"""What this host says of itself below /proc and /sys, as far as promises hang on it. What cannot be read is None: not known, never assumed."""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HostFacts:
    """`memory_bytes`: all that the host has."""

    kernel: str | None = None
    swaps: tuple[str, ...] | None = None
    """Devices and files that are swapped to."""
    overcommit: int | None = None
    """vm.overcommit_memory: 0 by guess, 1 always, 2 never."""
    memory_bytes: int | None = None
    inotify_instances: int | None = None
    smt_active: bool | None = None
    ksm_running: bool | None = None


def read_host_facts(root: Path = Path("/")) -> HostFacts:
    """Reads a few small files; raises nothing."""
    smt = _read_number(root / "sys/devices/system/cpu/smt/active")
    ksm = _read_number(root / "sys/kernel/mm/ksm/run")
    return HostFacts(
        kernel=_read(root / "proc/sys/kernel/osrelease"),
        swaps=_parse_swaps(_read(root / "proc/swaps")),
        overcommit=_read_number(root / "proc/sys/vm/overcommit_memory"),
        memory_bytes=_parse_total(_read(root / "proc/meminfo") or ""),
        inotify_instances=_read_number(root / "proc/sys/fs/inotify/max_user_instances"),
        smt_active=None if smt is None else bool(smt),
        ksm_running=None if ksm is None else ksm == 1,
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


def _parse_total(meminfo: str) -> int | None:
    """In bytes, of the line `MemTotal: 16303044 kB`."""
    found = re.search(r"^MemTotal:\s*([0-9]{1,15}) kB$", meminfo, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024
