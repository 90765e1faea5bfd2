"""The AppArmor profile of sandboxes that sandboxd starts itself: the one that the engine loads for its containers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from toolcrew.workers.sandboxd.runtime.engine import EngineFacts

PROFILE: Final = "docker-default"
_TASK: Final = Path("/proc/thread-self")


@dataclass(frozen=True)
class ProfileChoice:
    """`profile`: its name. None: sandboxes have none, because of `obstacle`, or because the kernel has no AppArmor."""

    profile: str | None = None
    obstacle: str | None = None


NO_PROFILE: Final = ProfileChoice()


def choose_profile(facts: EngineFacts, root: Path = Path("/sys"), task: Path = _TASK) -> ProfileChoice:
    """Choose the profile. `root`: the mount point of sysfs. `task`: this thread in /proc, whose next program starts
    unconfined. This function does not raise.
    """
    try:
        is_enabled = (root / "module/apparmor/parameters/enabled").read_text(encoding="ascii").startswith("Y")
    except OSError:
        is_enabled = False
    if not is_enabled:
        return NO_PROFILE
    try:
        lines = (root / "kernel/security/apparmor/profiles").read_text(encoding="utf-8", errors="replace").splitlines()
        is_loaded = any(line.split(" ")[0] == PROFILE for line in lines)
    except OSError:
        # A container does not see the list. The engine reports AppArmor only if it can load the profile.
        is_loaded = "apparmor" in facts.security
    if not is_loaded:
        return ProfileChoice(obstacle=f"the kernel does not have the profile {PROFILE}, which the engine loads")
    try:
        start_next_program_unconfined(task)
    except OSError as error:
        return ProfileChoice(obstacle=f"sandboxd may not change the profile of its programs ({error.strerror})")
    return ProfileChoice(PROFILE)


def start_next_program_unconfined(task: Path = _TASK) -> None:
    """Let the next program of this thread start without a profile of its own. Distributions have one for crun and runc.
    The kernel would combine it with that of the sandbox, whose processes could then send no signals to each other.
    Raises OSError.
    """
    (task / "attr/apparmor/exec").write_text("exec unconfined", encoding="ascii")


def read_label(process: Path) -> str:
    """Return the profile of a process and its mode, such as `docker-default (enforce)`. Raises OSError."""
    return (process / "attr/apparmor/current").read_text(encoding="utf-8", errors="replace").strip()
