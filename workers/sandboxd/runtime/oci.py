"""Sandboxes that sandboxd starts with an OCI runtime (crun or runc), on images that the Docker engine keeps.

Every sandbox has a folder `<folder>/sandboxes/<id>` with its labels, its configuration and a lock. Invariants:

- The folder exists before anything else of the sandbox and is removed last, so every leftover is found from it.
- A start holds the lock, also through the runtime program, which inherits its descriptor. So a removal, by this process
  or by another, never overtakes a start, not even one whose sandboxd was killed.
- No mount of a sandbox is in the mount table of the host (mounts.py): its processes hold them, and nothing else.
"""

import asyncio
import base64
import contextlib
import fcntl
import functools
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import structlog

from contract.errors import SandboxUnavailable
from workers.sandboxd.disks.changes import RootChanges, list_changes
from workers.sandboxd.disks.image import (
    CHANGES,
    FOLDER_FLAGS,
    WORKSPACE,
    WORKSPACE_OPTIONS,
    open_each,
    open_workspaces,
)
from workers.sandboxd.disks.mount_api import NODEV, NOSUID, RDONLY
from workers.sandboxd.disks.workspace_store import run_to_end
from workers.sandboxd.runtime.base import (
    LABEL_CREATED_AT,
    LABEL_DEADLINE,
    LABEL_DEPLOYMENT,
    PRODUCT_PIN,
    AttachedContainer,
    ListedContainer,
)
from workers.sandboxd.runtime.bundle import build_bundle, make_skeleton, skeleton_name
from workers.sandboxd.runtime.cgroups import PARENT, Cgroups
from workers.sandboxd.runtime.engine import Engine, EngineFacts
from workers.sandboxd.runtime.hardening import GUEST_FOLDER, SKILLS_FOLDER, SandboxSpec
from workers.sandboxd.runtime.id_ranges import IdRanges
from workers.sandboxd.runtime.mounts import (
    ROOTS,
    attach,
    attached,
    clone_tree,
    enter_private_namespace,
    mount_overlay,
    set_attributes,
)
from workers.sandboxd.runtime.oci_drift import find_kernel_drift

log = structlog.get_logger(__name__)

FOLDER: Final = Path("/run/toolcrew/oci")
"""The folder of all sandboxes that the sandboxds of this host start themselves."""
PIN_PREFIX: Final = "toolcrew-pin-"
_THREADS: Final = 8
"""Starts and removals at a time."""
_START_S: Final = 30.0
_LOCK_S: Final = 35.0
"""Time limit in seconds for a start of another process, which holds the lock."""
_KILL_S: Final = 15.0
_PAUSE_S: Final = 0.005
_HOST_CGROUPS: Final = 0xEFFFFFFB
"""Inode of the first control group namespace (PROC_CGROUP_INIT_INO of the kernel)."""
_CHANGES: Final = (CHANGES, "work")
_WORKSPACE: Final = (WORKSPACE, "workspace-work")
"""Folders of a disk, each with the work folder of its overlay."""
_ERROR_CHARS: Final = 500


@dataclass
class _RunningSandbox:
    """A sandbox of this process. `process`: a descriptor of its PID 1. `changes`: descriptors of the folders with the
    changes of its root file system, the latest first.
    """

    base: int
    process: int | None = None
    changes: list[int] = field(default_factory=list)


def find_obstacle(facts: EngineFacts) -> str | None:
    """Return why this process cannot start sandboxes itself, or None when nothing is missing. A test with a real
    sandbox (daemon.py) shows whether the kernel supports all of it.
    """
    if os.geteuid() != 0:
        return "sandboxd is not root"
    if find_program() is None:
        return "neither crun nor runc is installed"
    if facts.storage_driver != "overlay2" or not (Path(facts.data_root) / "overlay2").is_dir():
        return f"the engine's layers are not folders that sandboxd sees (driver {facts.storage_driver})"
    if facts.security & {"rootless", "userns"}:
        return "the engine maps the owners of its layers (rootless or userns-remap)"
    if facts.cgroup_version == 2 and Path("/proc/self/ns/cgroup").stat().st_ino != _HOST_CGROUPS:
        return (
            "sandboxd's container has a control group namespace of its own, from which the kernel moves no process: "
            "set default-cgroupns-mode to host in the engine's daemon.json"
        )
    return None


def find_program() -> str | None:
    """Return the path of the OCI runtime: crun, which starts faster, or runc."""
    return shutil.which("crun") or shutil.which("runc")


class OciRuntime:
    """A sandbox runtime (runtime/base.py) of this process. `program`: the path of crun or runc. `data_root`: the folder
    of the engine.

    Raises SandboxUnavailable when the host lacks something.
    """

    stacks_layers = True

    def __init__(self, engine: Engine, program: str, data_root: Path, folder: Path = FOLDER) -> None:
        self._engine = engine
        self._program = program
        # crun writes "crun version 1.8.1", runc "runc version 1.1.5+ds1", and both more lines.
        shown = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_START_S, check=False)
        self.version = " ".join(shown.stdout.split("\n")[0].split(" version "))[:60]
        """The program and its version, such as `crun 1.8.1`."""
        self._sandboxes = folder / "sandboxes"
        self._state = folder / "state"
        self._skeleton = folder / skeleton_name()
        self._cgroups = Cgroups()
        self._running: dict[str, _RunningSandbox] = {}
        self._forgetting = threading.Lock()
        self._pins: dict[tuple[str, ...], asyncio.Future[Mapping[str, str]]] = {}
        self._pin_names: dict[str, str] = {}
        """Name of a pin -> content id of its image."""
        self._filters: dict[bool, str] = {}
        """Compiled filters in base64. Key: whether programs run as root of the sandbox."""
        for place in (self._sandboxes, self._state):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_unfinished(self._sandboxes)
        make_skeleton(self._skeleton)
        self._ranges = IdRanges(folder / "ids")
        needed = (folder, data_root, *map(Path, ("/usr", sys.prefix, sys.base_prefix)), Path(program).resolve())
        self._threads = ThreadPoolExecutor(
            _THREADS, "oci", initializer=functools.partial(enter_private_namespace, needed)
        )
        try:
            self._threads.submit(int).result()
        except BrokenExecutor as error:
            self._ranges.close()
            raise SandboxUnavailable(
                "the kernel refuses mount namespaces: run sandboxd as root, or give it CAP_SYS_ADMIN"
            ) from error

    async def start(self, spec: SandboxSpec, name: str) -> AttachedContainer:
        sandbox = _id_of(name)
        volumes = await self._pin(spec)
        with ExitStack() as stack:
            base = self._ranges.take()
            stack.callback(self._ranges.give_back, base)
            disks = []
            if spec.workspace.bind is not None:
                # Clone the mount in this thread: the worker threads do not see the mounts of the host's namespace.
                disks.append(_clone_workspace(spec.workspace.bind))
                stack.callback(os.close, disks[0])
            for layer in spec.workspace.layers:
                disks.append(os.dup(layer))
                stack.callback(os.close, disks[-1])
            # From here on a removal finds everything that the thread makes by the folder of the sandbox, so nothing is
            # undone here.
            lock = self._open(sandbox, name, spec)
            self._running[sandbox] = _RunningSandbox(base)
            stack.pop_all()
        starting = asyncio.get_running_loop().run_in_executor(
            self._threads, functools.partial(self._start, sandbox, spec, volumes, disks, lock)
        )
        try:
            # A thread cannot be stopped. After a cancellation the caller removes the sandbox, and that waits for the
            # lock.
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_close_unused)
            raise

    async def find_drift(self, container: str, spec: SandboxSpec) -> list[str]:
        running = self._running[_id_of(container)]
        # Read the pid from the file that the runtime program wrote, so that the check examines the process that was
        # started.
        process = int((self._sandboxes / _id_of(container) / "pid").read_text(encoding="ascii"))
        return find_kernel_drift(process, spec, running.base, self._cgroups, _id_of(container))

    async def list_changes(self, container: str, spec: SandboxSpec) -> RootChanges | None:
        if not spec.is_root:
            return None
        # A removal closes the descriptors, whose numbers may then be those of another session.
        with self._forgetting:
            running = self._running.get(_id_of(container))
            layers = [os.dup(fd) for fd in running.changes] if running is not None else []
        return await run_to_end(lambda: _list_and_close(spec.image_facts.id, layers))

    async def pause(self, container: str) -> None:
        await self._run(lambda: _freeze(self._cgroups, _id_of(container), is_wanted=True))

    async def unpause(self, container: str) -> None:
        await self._run(lambda: _freeze(self._cgroups, _id_of(container), is_wanted=False))

    async def remove(self, container: str) -> None:
        if container.startswith(PIN_PREFIX):
            await self._engine.remove(container)
            return
        await self._run(lambda: self._remove(_id_of(container)))

    async def list_sandboxes(self, deployment: str) -> list[ListedContainer]:
        listed = [self._read_labels(place) for place in sorted(self._sandboxes.glob("[!.]*"))]
        pins = await self._engine.list_containers(deployment, PRODUCT_PIN)
        # A pin is never started, so the state "created" of the engine says nothing.
        listed += [replace(pin, id=pin.name, state="running") for pin in pins if pin.name not in self._pin_names]
        return [container for container in listed if container.labels.get(LABEL_DEPLOYMENT) == deployment]

    async def close(self) -> None:
        """End the threads, and remove what all sandboxes share."""
        for pin in list(self._pin_names):
            try:
                await self._engine.remove(pin)
            except SandboxUnavailable as error:
                # The reaper of the next sandboxd removes it.
                log.warning("image_pin_not_removed", container=pin, error=str(error))
        self._threads.shutdown()
        self._ranges.close()
        self._cgroups.remove_parent()

    async def unpin(self, image: str) -> None:
        """Let the engine remove the image of a content id. No sandbox of it may run or start meanwhile."""
        for key in [key for key in self._pins if key[0] == image]:
            del self._pins[key]
        for pin in [pin for pin, pinned in self._pin_names.items() if pinned == image]:
            await self._engine.remove(pin)
            self._pin_names.pop(pin, None)

    async def _pin(self, spec: SandboxSpec) -> Mapping[str, str]:
        """Create a container that is never started. It keeps image and volumes of a sandbox, which the engine does not
        see, from removal. Returns the folders of the volumes on this host, by their path in the sandbox.
        """
        volumes = {
            place: volume
            for place, volume in ((GUEST_FOLDER, spec.guest_volume), (SKILLS_FOLDER, spec.skills_volume))
            if volume is not None
        }
        key = (spec.image_facts.id, *volumes.values())
        if not spec.image_facts.layers:
            raise SandboxUnavailable(
                f"the engine has no image {spec.image}, or does not keep its layers as folders: build it with "
                "scripts/build-image, or pull it"
            )
        if key not in self._pins:
            # Starts of the same image at the same time share one task. A cancelled start must not leave a pin that no
            # later start uses.
            self._pins[key] = asyncio.ensure_future(self._make_pin(key, spec, volumes))
        return await asyncio.shield(self._pins[key])

    async def _make_pin(self, key: tuple[str, ...], spec: SandboxSpec, volumes: Mapping[str, str]) -> Mapping[str, str]:
        # The name is stored before the container exists, so that a sweep does not remove it.
        pin = f"{PIN_PREFIX}{secrets.token_hex(8)}"
        self._pin_names[pin] = spec.image_facts.id
        # Without the deadline of the sandbox: a pin lives as long as this process. Another sandboxd of this engine
        # would remove it at the deadline, and the image could then be removed below running sandboxes.
        labels = {name: value for name, value in spec.labels.items() if name != LABEL_DEADLINE}
        try:
            await self._engine.pin(pin, spec.image_facts.id, labels, volumes)
            return {place: await self._engine.volume_path(volume) for place, volume in volumes.items()}
        except BaseException:
            # The engine may have made the container all the same. The next start makes another pin, and a sweep removes
            # one whose name is not stored.
            self._pin_names.pop(pin, None)
            self._pins.pop(key, None)
            raise

    async def _run(self, work: Callable[[], None]) -> None:
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, work))

    def _open(self, sandbox: str, name: str, spec: SandboxSpec) -> int:
        """Make the folder of a sandbox. Returns the locked descriptor of its lock."""
        # The name is hidden until the folder has its lock and its labels: a removal that finds the folder relies on
        # both.
        place = self._sandboxes / f".{sandbox}"
        with ExitStack() as failure:
            try:
                place.mkdir(mode=0o700)
                failure.callback(shutil.rmtree, place, ignore_errors=True)
                lock = os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                failure.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX)
                labels = {"name": name, "labels": dict(spec.labels)}
                (place / "labels.json").write_text(json.dumps(labels), encoding="utf-8")
                place.rename(self._sandboxes / sandbox)
            except OSError as error:
                raise SandboxUnavailable(
                    f"the folder {place} of a sandbox cannot be created: {error}; check its permissions and its disk"
                ) from error
            failure.pop_all()
        return lock

    def _start(
        self,
        sandbox: str,
        spec: SandboxSpec,
        volumes: Mapping[str, str],
        disks: Sequence[int],
        lock: int,
    ) -> AttachedContainer:
        """Start a sandbox. `disks`: mounts of the disk of its workspace, if it has one, and of the layers below it."""
        place, running = self._sandboxes / sandbox, self._running[sandbox]
        with ExitStack() as stack:
            stack.callback(os.close, lock)
            for disk in disks:
                stack.callback(os.close, disk)
            try:
                namespace = self._ranges.namespace(running.base)
                bundle = build_bundle(
                    spec,
                    root=ROOTS / sandbox,
                    cgroup=f"/{PARENT}/{sandbox}",
                    base=running.base,
                    seccomp_bpf=self._filters.get(spec.is_root),
                )
                (place / "config.json").write_text(json.dumps(bundle), encoding="utf-8")
                # Only the first disk is the session's own. Its layers belong to other sessions, too.
                for index, disk in enumerate(disks):
                    set_attributes(disk, NOSUID | NODEV | (RDONLY if index else 0), namespace)
                content = _Content(workspace=disks[0] if disks else None)
                if spec.is_root or len(disks) > 1:
                    content = stack.enter_context(
                        _divided(disks, namespace, sandbox, root=running.base if spec.is_root else None)
                    )
                lower: list[str | Path | int] = [*content.changed, self._skeleton, *spec.image_facts.layers]
                root = mount_overlay(lower, namespace, content.changes)
                stack.callback(os.close, root)
                (ROOTS / sandbox).mkdir()
                stack.callback((ROOTS / sandbox).rmdir)
                with attached(root, ROOTS / sandbox):
                    if content.workspace is not None:
                        attach(content.workspace, ROOTS / sandbox / "workspace")
                    for folder, volume in volumes.items():
                        mount = clone_tree(volume, RDONLY | NOSUID | NODEV, namespace)
                        stack.callback(os.close, mount)
                        attach(mount, ROOTS / sandbox / folder.lstrip("/"))
                    started = self._run_program(sandbox, running, lock)
                if content.changes is not None:
                    for fd in (content.changes[0], *content.changed):
                        running.changes.append(os.dup(fd))
                self._keep_filter(sandbox, spec)
                return started
            except OSError as error:
                raise SandboxUnavailable(
                    f"sandbox {sandbox} cannot be started: {error}; run `toolcrew doctor` on this host"
                ) from error

    def _run_program(self, sandbox: str, running: _RunningSandbox, lock: int) -> AttachedContainer:
        place = self._sandboxes / sandbox
        # The channel is made here and not by the program: no path leads to it, so no other process can connect.
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with theirs, ExitStack() as stack:
            stack.callback(os.close, writing)
            failure = stack.enter_context(ExitStack())
            failure.callback(os.close, reading)
            failure.callback(ours.close)
            self._call(sandbox, (theirs.fileno(), writing), lock)
            process = int((place / "pid").read_text(encoding="ascii"))
            running.process = self._cgroups.open_process(sandbox, process)
            failure.pop_all()
        # crun creates this folder in place of the hidden groups of version 2, in this thread's namespace (mounts.py).
        shutil.rmtree(f"/sys/fs/cgroup/unified/{PARENT}", ignore_errors=True)
        ours.setblocking(False)
        return AttachedContainer(sandbox, ours, process, reading)

    def _call(self, sandbox: str, streams: tuple[int, int], lock: int) -> None:
        """Run the program until the sandbox runs. `streams`: its stdin and stdout, and its stderr. Raises
        SandboxUnavailable with the end of the program's log.
        """
        place = self._sandboxes / sandbox
        log_file = place / "log"
        stdio, stderr = streams
        options = ["--root", str(self._state), "--log", str(log_file)]
        files = ["--bundle", str(place), "--pid-file", str(place / "pid")]
        try:
            subprocess.run(
                [self._program, *options, "run", "--detach", *files, sandbox],
                stdin=stdio,
                stdout=stdio,
                stderr=stderr,
                pass_fds=(lock,),
                timeout=_START_S,
                check=True,
            )
        except subprocess.TimeoutExpired as error:
            raise SandboxUnavailable(
                f"{self._program} did not start sandbox {sandbox} in {_START_S:g} s: the host may be "
                f"overloaded; try again"
            ) from error
        except subprocess.CalledProcessError as error:
            text = log_file.read_text(encoding="utf-8", errors="replace").strip() if log_file.exists() else ""
            raise SandboxUnavailable(
                f"{self._program} did not start sandbox {sandbox}: {text[-_ERROR_CHARS:] or error}; run "
                f"`toolcrew doctor` on this host"
            ) from error

    def _keep_filter(self, sandbox: str, spec: SandboxSpec) -> None:
        """Keep the filter that crun has compiled, for later starts. runc has none to keep."""
        compiled = self._state / sandbox / "seccomp.bpf"
        if spec.is_root not in self._filters and compiled.exists():
            self._filters[spec.is_root] = base64.b64encode(compiled.read_bytes()).decode("ascii")

    def _remove(self, sandbox: str) -> None:
        place = self._sandboxes / sandbox
        if not place.exists():  # another sandboxd may have removed it at its deadline
            self._forget(sandbox)
            return
        try:
            with self._locked(sandbox):
                running = self._running.get(sandbox)
                # A frozen process handles no signal, not even SIGKILL in version 1.
                with contextlib.suppress(FileNotFoundError):
                    self._cgroups.thaw(sandbox)
                if running is not None and running.process is not None:
                    _end_process(running.process)
                # Kill even if this sandboxd started no process: another sandboxd, which was killed, may have started
                # it.
                self._cgroups.kill(sandbox, _KILL_S)
                self._cgroups.remove(sandbox, _KILL_S)
                shutil.rmtree(self._state / sandbox, ignore_errors=True)
                # Rename the folder first: a removal at the same time, or after a kill, must not find a folder without
                # its lock.
                shutil.rmtree(place.rename(place.with_name(f".{sandbox}")))
                # Close the descriptors under the lock: a second removal must not use them afterwards.
                self._forget(sandbox)
        except (OSError, TimeoutError) as error:
            if place.exists():  # Otherwise another removal was quicker.
                raise SandboxUnavailable(
                    f"sandbox {sandbox} cannot be removed: {error}; sandboxd tries again"
                ) from error

    def _forget(self, sandbox: str) -> None:
        """Free the resources that this process has for an ended sandbox. If two removals run at the same time, only one
        of them does this.
        """
        with self._forgetting:
            ended = self._running.pop(sandbox, None)
        if ended is None:
            return
        for fd in (*ended.changes, *(() if ended.process is None else (ended.process,))):
            os.close(fd)
        self._ranges.give_back(ended.base)

    @contextmanager
    def _locked(self, sandbox: str) -> Iterator[None]:
        """Hold the lock of a sandbox. Raises OSError and TimeoutError."""
        # Open the file anew each time: two removals in this process must exclude each other, too.
        fd = os.open(self._sandboxes / sandbox / "lock", os.O_RDWR | os.O_CLOEXEC)
        until = time.monotonic() + _LOCK_S
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        # A start that was cancelled has left a process that holds the lock.
                        self._cgroups.kill(sandbox, _KILL_S)
                        raise TimeoutError(f"its start has not ended in {_LOCK_S:g} s") from None
                    time.sleep(_PAUSE_S)
            yield
        finally:
            os.close(fd)

    def _read_labels(self, place: Path) -> ListedContainer:
        try:
            content = json.loads((place / "labels.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            content = {"name": place.name, "labels": {}}  # The start was interrupted, or the removal has just ended.
        labels = {str(name): str(value) for name, value in content["labels"].items()}
        state = "running" if self._cgroups.exists(place.name) else "created"
        return ListedContainer(
            place.name, str(content["name"]), state, labels, float(labels.get(LABEL_CREATED_AT) or time.time())
        )


def _id_of(name: str) -> str:
    """Return the id of a sandbox: the random part of its name."""
    return name.rpartition("-")[2]


def _list_and_close(image: str, layers: Sequence[int]) -> RootChanges:
    try:
        return list_changes(image, layers)
    except OSError as error:
        raise SandboxUnavailable(
            f"the changes of the root file system cannot be listed: {error}; check the disk of this host"
        ) from error
    finally:
        for fd in layers:
            os.close(fd)


def _clone_workspace(folder: str) -> int:
    try:
        return clone_tree(folder)
    except OSError as error:
        raise SandboxUnavailable(
            f"the workspace {folder} cannot be mounted: {error}; run `toolcrew doctor` on this host"
        ) from error


@dataclass(frozen=True)
class _Content:
    """Content of a session's disks, as descriptors. `changes`: the folders of the overlay of the root file system,
    unless that is read-only. `changed`: folders with earlier changes, the latest first.
    """

    workspace: int | None
    changes: tuple[int, int] | None = None
    changed: Sequence[int] = ()


@contextmanager
def _divided(disks: Sequence[int], namespace: int, sandbox: str, *, root: int | None) -> Iterator[_Content]:
    """Divide a session's disk between the changes of the root file system and the workspace. Both share the size of the
    disk, and are stacked on those of the layers below. `root`: the host id of the sandbox's root user; None without
    changes of the root file system. Without such changes and without layers, the disk is the workspace. Raises OSError.
    """
    disk, *layers = disks
    place = ROOTS / f"{sandbox}.disk"
    place.mkdir()
    with ExitStack() as stack:
        stack.callback(place.rmdir)

        def open_folder(path: Path) -> int:
            fd = os.open(path, FOLDER_FLAGS)
            stack.callback(os.close, fd)
            return fd

        # The kernel clones a part only of an attached mount.
        stack.enter_context(attached(disk, place))
        lower = list(open_workspaces(layers, stack, is_root=root is not None))
        folders = [(name, root, root, 0o755) for name in (*_CHANGES, _WORKSPACE[0]) if root is not None]
        if lower:
            like = os.stat(lower[0])
            folders += [(name, like.st_uid, like.st_gid, like.st_mode & 0o7777) for name in _WORKSPACE]
        for name, uid, gid, mode in reversed(folders):
            _make_folder(place / name, uid, gid, mode)
        if lower:
            upper, work = (open_folder(place / name) for name in _WORKSPACE)
            workspace = mount_overlay(lower, namespace, (upper, work), WORKSPACE_OPTIONS)
        else:
            workspace = clone_tree(place / _WORKSPACE[0])
        stack.callback(os.close, workspace)
        if root is None:
            yield _Content(workspace)
            return
        changes, work = (open_folder(place / name) for name in _CHANGES)
        yield _Content(workspace, (changes, work), list(open_each(layers, CHANGES, stack)))


def _make_folder(place: Path, uid: int, gid: int, mode: int) -> None:
    """Make a folder of a disk, unless an earlier sandbox of the session has made it."""
    if place.exists():
        return
    # Rename the folder last: a start that was killed in between must not leave a folder with the wrong owner or mode.
    unfinished = place.with_name("unfinished")
    unfinished.mkdir(exist_ok=True)
    os.chown(unfinished, uid, gid)
    unfinished.chmod(mode)
    unfinished.rename(place)


def _remove_unfinished(sandboxes: Path) -> None:
    """Remove folders that a killed process had begun to make. Nothing of a sandbox existed then."""
    for place in sandboxes.glob(".*"):
        with contextlib.suppress(OSError):  # Another process has just completed the folder.
            if place.stat().st_mtime < time.time() - _START_S:
                shutil.rmtree(place)


def _freeze(cgroups: Cgroups, sandbox: str, *, is_wanted: bool) -> None:
    try:
        if is_wanted:
            cgroups.freeze(sandbox, _KILL_S)
        else:
            cgroups.thaw(sandbox)
    except FileNotFoundError as error:
        raise SandboxUnavailable("the sandbox was removed: the session gets another one at its next call") from error
    except (OSError, TimeoutError) as error:
        raise SandboxUnavailable(
            f"sandbox {sandbox} cannot be paused or continued: {error}; open a new session if it repeats"
        ) from error


def _end_process(process: int) -> None:
    """Kill a PID 1, and return when all processes of its namespace have ended: the kernel lets it end last."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    ended = select.poll()
    ended.register(process, select.POLLIN)
    if not ended.poll(_KILL_S * 1000):
        raise TimeoutError(f"its PID 1 does not end in {_KILL_S:g} s")


def _close_unused(starting: "asyncio.Future[AttachedContainer]") -> None:
    """Close the streams of a sandbox whose starter was cancelled."""
    if not starting.cancelled() and starting.exception() is None:
        container = starting.result()
        container.sock.close()
        if container.stderr is not None:
            os.close(container.stderr)
