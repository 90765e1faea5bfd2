"""The sandboxes of this host as the host sees them: those of the engine, and those that sandboxd started itself."""

import contextlib
import json
from pathlib import Path

from docker import APIClient

from toolcrew.workers.sandboxd.cgroups import PARENT, ROOT
from toolcrew.workers.sandboxd.runtime.oci import FOLDER

FOLDERS = FOLDER / "sandboxes"


def pid_of(api: APIClient, short: str) -> int:
    """Return the host's PID of PID 1 of a running sandbox. `short`: the beginning of its id."""
    sandbox = find_own(short)
    if sandbox is None:
        return int(api.inspect_container(short)["State"]["Pid"])
    return int((FOLDERS / sandbox / "pid").read_text())


def find_own(short: str) -> str | None:
    """Return the full id of a sandbox that sandboxd started itself; None when there is none with that beginning."""
    found = [folder.name for folder in FOLDERS.glob(f"{short}*")]
    return found[0] if found else None


def list_containers(api: APIClient, *labels: str) -> dict[str, str]:
    """Return id -> state of all sandboxes with these labels (`name=value`): those of the engine, as it lists them, and
    those that sandboxd started itself and that have a process.
    """
    filters = {"label": ["toolcrew.product=sandbox", *labels]}
    found = {str(one["Id"]): str(one["State"]) for one in api.containers(all=True, filters=filters)}
    for sandbox in list_folders(*labels):
        state = _state_of(sandbox)
        if state is not None:
            found[sandbox] = state
    return found


def list_folders(*labels: str) -> list[str]:
    """Return the ids of sandboxes with these labels of which anything is left, even if they have ended."""
    wanted, found = dict(label.split("=") for label in labels), []
    for folder in FOLDERS.glob("[!.]*"):
        with contextlib.suppress(FileNotFoundError, ValueError):  # it is being removed
            if wanted.items() <= json.loads((folder / "labels.json").read_text())["labels"].items():
                found.append(folder.name)
    return found


def list_pins(api: APIClient, *labels: str) -> list[str]:
    """Return the containers with these labels that keep images from removal."""
    filters = {"label": ["toolcrew.product=pin", *labels]}
    return [str(container["Id"]) for container in api.containers(all=True, filters=filters)]


def _state_of(sandbox: str) -> str | None:
    for processes, freezer in (("pids", "freezer"), ("", "")):
        folder = ROOT / processes / PARENT / sandbox
        state = ROOT / freezer / PARENT / sandbox / ("freezer.state" if freezer else "cgroup.freeze")
        with contextlib.suppress(OSError):  # a group that is being removed has no file, or a file without a device
            if not (folder / "cgroup.procs").read_text().split():
                return None
            return "paused" if state.read_text().strip() in ("FROZEN", "1") else "running"
    return None


def list_groups() -> set[Path]:
    """Return the control groups of all sandboxes that sandboxd started itself."""
    return {*ROOT.glob(f"*/{PARENT}/*/"), *ROOT.glob(f"{PARENT}/*/")}
