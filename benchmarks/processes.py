"""Processes that a benchmark starts: a sandboxd, or the guest alone.

Each process has its own folder, which is removed when the process ends. Engines and sandboxd mount file systems in
their folders. A killed one leaves its mounts, and the kernel refuses to remove a folder with a mount.
"""

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandbox_client import SandboxClient
from toolcrew.workers.sandboxd.daemon import STOP_AND_REMOVE
from toolcrew.workers.sandboxd.disks.loop_mounts import unmount
from toolcrew.workers.sandboxd.disks.mounts import list_mounts

ROOT = Path(__file__).resolve().parent.parent
START_LIMIT_S = 60.0
STOP_LIMIT_S = 60.0
_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def temporary_folder(parent: str | None = None) -> Iterator[Path]:
    """Yield a new folder. Remove it at the end, with everything that is mounted in it."""
    with tempfile.TemporaryDirectory(prefix="toolcrew-bench-", dir=parent) as name:
        folder = Path(name)
        try:
            yield folder
        finally:
            unmount_below(folder)


def unmount_below(folder: Path) -> None:
    """Remove all mounts in a folder, also those that another process has left."""
    for place in reversed(list_mounts()):
        if place.is_relative_to(folder):
            unmount(place)


@dataclass(frozen=True)
class RunningSandboxd:
    """Running sandboxd of a benchmark. `name`: the label of its containers. `state`: its folder of workspaces and
    records.
    """

    pid: int
    socket: Path
    name: str
    state: Path


@contextlib.contextmanager
def child_process(
    argv: Sequence[str], environment: Mapping[str, str], log: Path, end_signal: int = signal.SIGTERM
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a child process that ends with this block, and also if this process is killed."""
    with log.open("ab") as logfile:
        child = subprocess.Popen(
            argv,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=logfile,
            stderr=logfile,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    try:
        yield child
    finally:
        child.send_signal(end_signal)
        try:
            child.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"bench: process {child.pid} did not stop in {STOP_LIMIT_S:g} s and is killed\n")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@contextlib.contextmanager
def running_sandboxd(settings: Mapping[str, str] | None = None) -> Iterator[RunningSandboxd]:
    """Start a sandboxd and yield it when it answers. Its sandboxes are removed at the end.

    The sandboxd has no warm pool unless `settings` configures one. Raises SandboxUnavailable when sandboxd does not
    start, with the end of its output.
    """
    name = f"bench-{secrets.token_hex(4)}"
    with temporary_folder() as folder:
        environment = {
            "TOOLCREW_SANDBOXD_SOCKET": str(folder / "sandboxd.sock"),
            "TOOLCREW_SANDBOXD_NAME": name,
            "TOOLCREW_DEPLOYMENT": name,
            "TOOLCREW_SANDBOXD_STATE": str(folder / "state"),
            "TOOLCREW_SANDBOXD_LEASES": str(folder / "leases"),
            "TOOLCREW_POOL_SIZE": "0",
            "TOOLCREW_LOG_LEVEL": "WARNING",
            **(settings or {}),
        }
        with child_process(
            [sys.executable, "-m", "toolcrew.workers.sandboxd"], environment, folder / "log", STOP_AND_REMOVE
        ) as child:
            until = time.monotonic() + START_LIMIT_S
            while True:
                try:
                    with SandboxClient(folder / "sandboxd.sock") as client:
                        client.status()
                    break
                except SandboxUnavailable:
                    if child.poll() is not None or time.monotonic() > until:
                        log_text = (folder / "log").read_text(errors="replace").strip()
                        raise SandboxUnavailable(log_text or "sandboxd did not start") from None
                    time.sleep(0.05)
            yield RunningSandboxd(child.pid, folder / "sandboxd.sock", name, folder / "state")


@contextlib.contextmanager
def guest_on_pipes(prelude: str = "") -> Iterator["subprocess.Popen[bytes]"]:
    """Start the guest as PID 1 of a separate PID namespace, without an engine, a container or a filter. Needs root.

    `prelude`: statements that run first in the process. Each statement ends with a semicolon.
    """
    with tempfile.TemporaryDirectory(prefix="toolcrew-bench-") as name:
        boot = (
            f"import sys; {prelude} sys.path.insert(0, sys.argv[1]); from guest.loop import main, Options; from "
            "guest.paths import GuestPaths;main(Options(), GuestPaths((sys.argv[2].encode(),), sys.argv[2].encode() + "
            "b'/output'))"
        )
        (Path(name) / "output").mkdir()
        python = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable
        guest = [python, "-I", "-S", "-u", "-c", boot, str(ROOT / "sandbox-images"), name]
        argv = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *guest]
        child = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, preexec_fn=_die_with_parent
        )
        try:
            yield child
        finally:
            # Closing stdin ends the guest. If that fails, --kill-child ensures that no process remains.
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)
            child.kill()
            child.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def wait_for(path: Path) -> None:
    until = time.monotonic() + 20
    while not path.exists():
        if time.monotonic() > until:
            raise RuntimeError(f"nobody listens at {path}")
        time.sleep(0.01)
