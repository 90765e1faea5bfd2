"""Sandboxes that sandboxd starts with an OCI runtime (crun or runc), on images that the engine keeps.

Every sandbox has a folder `<folder>/sandboxes/<id>` with its labels, its configuration and a lock. Invariants:

- The folder is created before anything else of the sandbox and removed last, so it leads to every leftover.
- A start holds the lock. The runtime program inherits the lock's descriptor, so it holds the lock even if sandboxd is
  killed. So no process removes a sandbox during its start.
- No mount of a sandbox is in the mount table of the host (mounts.py): only the sandbox's processes hold its mounts.
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
import stat
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

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.image_names import advise_missing
from toolcrew.contract.session_spec import DEFAULT_HOSTNAME
from toolcrew.contract.settings import copy_environment
from toolcrew.workers.sandboxd.cgroups import PARENT, Cgroups
from toolcrew.workers.sandboxd.disks.base import FILES, find_folders
from toolcrew.workers.sandboxd.disks.image import CHANGES, FILES_OPTIONS, FOLDER_FLAGS, open_each
from toolcrew.workers.sandboxd.disks.mount_api import NODEV, NOSUID, RDONLY
from toolcrew.workers.sandboxd.disks.mounts import (
    ID_RANGE,
    ROOTS,
    attach_below,
    attached,
    attached_together,
    clone_tree,
    enter_private_namespace,
    mount_overlay,
    set_attributes,
)
from toolcrew.workers.sandboxd.runtime.apparmor import choose_profile, start_next_program_unconfined
from toolcrew.workers.sandboxd.runtime.base import (
    LABEL_CREATED_AT,
    LABEL_DEADLINE,
    LABEL_DEPLOYMENT,
    PRODUCT_PIN,
    AttachedContainer,
    ListedContainer,
)
from toolcrew.workers.sandboxd.runtime.bundle import (
    IMAGE_FOLDERS,
    build_bundle,
    give_tree,
    host_files,
    make_skeleton,
    skeleton_name,
)
from toolcrew.workers.sandboxd.runtime.cgroup_namespace import HOST_NAMESPACE, is_in_host_namespace
from toolcrew.workers.sandboxd.runtime.engine import EngineFacts
from toolcrew.workers.sandboxd.runtime.engines import ContainerEngine
from toolcrew.workers.sandboxd.runtime.hardening import GUEST_FOLDER, SKILLS_FOLDER, SandboxSpec
from toolcrew.workers.sandboxd.runtime.id_ranges import IdRanges
from toolcrew.workers.sandboxd.runtime.oci_drift import find_kernel_drift

log = structlog.get_logger(__name__)

FOLDER: Final = Path("/run/toolcrew/oci")
"""The folder of all sandboxes that sandboxds of this host start without the engine."""
PIN_PREFIX: Final = "toolcrew-pin-"
_THREADS: Final = 8
"""Maximum number of starts and removals at a time."""
_START_S: Final = 30.0
_LOCK_S: Final = 35.0
"""Time limit in seconds for a start of another process, which holds the lock."""
_KILL_S: Final = 15.0
_PAUSE_S: Final = 0.005
_CHANGES: Final = (CHANGES, "work")
_FILES: Final = (FILES, "files-work")
"""Folders of a disk, each with the work folder of its overlay."""
_ERROR_CHARS: Final = 500


@dataclass
class _RunningSandbox:
    """A sandbox of this process. `process`: a descriptor of its PID 1. `streams`: the socket to its stream server.
    `changes`: descriptors of the folders with the changes of its root file system, the newest layer first.
    """

    base: int
    process: int | None = None
    streams: socket.socket | None = None
    changes: list[int] = field(default_factory=list)


def find_obstacle(facts: EngineFacts) -> str | None:
    """Return why this process cannot start sandboxes itself, or None when nothing is missing. Whether the kernel
    supports everything is tested later with a real sandbox (daemon.py).
    """
    if os.geteuid() != 0:
        return "sandboxd is not root"
    if find_program() is None:
        return "neither crun nor runc is installed"
    if not facts.layer_root or not Path(facts.layer_root).is_dir():
        where = f", in the containerd at {facts.containerd}" if facts.containerd else ""
        return f"the engine's layers are not folders that sandboxd sees (driver {facts.storage_driver}{where})"
    if facts.security & {"rootless", "userns"}:
        return "the engine maps the owners of its layers (rootless or userns-remap)"
    if facts.cgroup_version == 2 and not is_in_host_namespace():
        return (
            "sandboxd's container has a control group namespace of its own, from which the kernel moves no process: "
            f"mount the host's /proc/1/ns/cgroup at {HOST_NAMESPACE}, and give sandboxd SYS_ADMIN"
        )
    return None


def find_program() -> str | None:
    """Return the path of the OCI runtime: crun, which starts faster, or runc."""
    return shutil.which("crun") or shutil.which("runc")


class OciRuntime:
    """A sandbox runtime (runtime/base.py) of this process. `program`: the path of crun or runc. `facts`: the engine,
    with the folders of its data.

    `unmapped`: why the owners of images cannot be mapped to the ids of a sandbox, or None where they are. Unmapped
    owners are `nobody` in a sandbox, there is no root inside, and no overlay on disks. Raises SandboxUnavailable when
    the host lacks something.
    """

    def __init__(self, engine: ContainerEngine, program: str, facts: EngineFacts, folder: Path = FOLDER) -> None:
        self._engine = engine
        self._program = program
        # crun prints "crun version 1.8.1", runc "runc version 1.1.5+ds1"; more lines follow.
        shown = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_START_S, check=False)
        self.version = " ".join(shown.stdout.split("\n")[0].split(" version "))[:60]
        """The program and its version, such as `crun 1.8.1`."""
        self._folder = folder
        self._sandboxes = folder / "sandboxes"
        self._state = folder / "state"
        self._cgroups = Cgroups()
        self._running: dict[str, _RunningSandbox] = {}
        self._forgetting = threading.Lock()
        self._pins: dict[tuple[str, ...], asyncio.Future[Mapping[str, str]]] = {}
        self._pin_names: dict[str, str] = {}
        """Name of a pin -> content id of its image."""
        self._filters: dict[tuple[bool, str], str] = {}
        """Compiled filters in base64. Key: whether programs run as root of the sandbox, and the profile."""
        for place in (self._sandboxes, self._state):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_unfinished(self._sandboxes)
        self._ranges = IdRanges(folder / "ids")
        places = (facts.data_root, facts.layer_root, "/usr", sys.prefix, sys.base_prefix)
        needed = (folder, *map(Path, places), Path(program).resolve())
        self._threads = ThreadPoolExecutor(
            _THREADS, "oci", initializer=functools.partial(enter_private_namespace, needed)
        )
        try:
            self.unmapped = self._threads.submit(self._try_id_map, facts.layer_root).result()
            self.stacks_layers = self.unmapped is None
            self.apparmor = self._threads.submit(choose_profile, facts).result()
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
            # From here on the folder leads a removal to everything that the thread makes, so a failure needs no cleanup
            # here.
            lock = self._open(sandbox, name, spec)
            self._running[sandbox] = _RunningSandbox(base)
            stack.pop_all()
        starting = asyncio.get_running_loop().run_in_executor(
            self._threads, functools.partial(self._start, sandbox, spec, volumes, disks, lock)
        )
        try:
            # A thread cannot be stopped. After a cancellation the caller removes the sandbox, and the removal waits for
            # the lock, which the thread holds.
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_close_unused)
            raise

    def _try_id_map(self, layers: str) -> str | None:
        """Return why the file system of the folder `layers` cannot be a layer with an id map, or None when it can."""
        base = self._ranges.take()
        with ExitStack() as stack:
            stack.callback(self._ranges.give_back, base)
            # An overlay that is read-only needs two layers. The other one, which may be on a tmpfs, is not mapped.
            other = _open_folder(self._sandboxes, stack)
            try:
                os.close(mount_overlay([layers, other], self._ranges.namespace(base)))
            except OSError as error:
                return f"the kernel cannot map the owners of image layers at {layers} ({error.strerror})"
        return None

    async def open_stream_channel(self, container: str) -> socket.socket:
        with self._forgetting:
            running = self._running.get(_id_of(container))
            if running is None or running.streams is None:
                raise SandboxUnavailable("the sandbox was removed: the session gets another one at its next call")
            return running.streams.dup()

    async def find_drift(self, container: str, spec: SandboxSpec) -> list[str]:
        running = self._running[_id_of(container)]
        # Read the pid from the file that the runtime program wrote, so that the right process is checked.
        process = int((self._sandboxes / _id_of(container) / "pid").read_text(encoding="ascii"))
        sandbox = _id_of(container)
        return find_kernel_drift(process, spec, running.base, self._cgroups, sandbox, self.apparmor.profile)

    def open_changes(self, container: str, spec: SandboxSpec) -> list[int] | None:
        if not spec.is_root:
            return None
        # Duplicate the descriptors: a removal may close them meanwhile, and another session may get the same numbers.
        with self._forgetting:
            running = self._running.get(_id_of(container))
            return [os.dup(fd) for fd in running.changes] if running is not None else []

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
        # A pin (the container that protects an image) is never started. Its state "created" would look like an
        # unfinished start.
        listed += [replace(pin, id=pin.name, state="running") for pin in pins if pin.name not in self._pin_names]
        return [container for container in listed if container.labels.get(LABEL_DEPLOYMENT) == deployment]

    async def close(self) -> None:
        """End the threads, and remove what all sandboxes share."""
        for pin in list(self._pin_names):
            try:
                await self._engine.remove(pin)
            except SandboxUnavailable as error:
                # The reaper of the next sandboxd removes the pin.
                log.warning("image_pin_not_removed", container=pin, error=str(error))
        self._threads.shutdown()
        self._ranges.close()
        self._cgroups.remove_parent()

    async def unpin(self, image: str) -> None:
        """Remove the pin of an image, so that the engine can remove the image. Meanwhile no sandbox of the image may
        run or start.
        """
        for key in [key for key in self._pins if key[0] == image]:
            del self._pins[key]
        for pin in [pin for pin, pinned in self._pin_names.items() if pinned == image]:
            await self._engine.remove(pin)
            self._pin_names.pop(pin, None)

    async def _pin(self, spec: SandboxSpec) -> Mapping[str, str]:
        """Create a pin: a container that is never started. It prevents the engine, which does not see the sandbox, from
        removing the sandbox's image and volumes. Return path in the sandbox -> folder on this host, for each volume.
        """
        volumes = {
            place: volume
            for place, volume in ((GUEST_FOLDER, spec.guest_volume), (SKILLS_FOLDER, spec.skills_volume))
            if volume is not None
        }
        key = (spec.image_facts.id, *volumes.values())
        if not spec.image_facts.layers:
            raise SandboxUnavailable(
                f"the engine has no image {spec.image}, or does not keep its layers as folders: "
                f"{advise_missing(spec.image)}"
            )
        if key not in self._pins:
            # Starts of the same image at the same time share one task. The task continues when one start is cancelled,
            # so that a later start can use the pin.
            self._pins[key] = asyncio.ensure_future(self._make_pin(key, spec, volumes))
        return await asyncio.shield(self._pins[key])

    async def _make_pin(self, key: tuple[str, ...], spec: SandboxSpec, volumes: Mapping[str, str]) -> Mapping[str, str]:
        # The name is stored before the container exists, so that a sweep does not remove it.
        pin = f"{PIN_PREFIX}{secrets.token_hex(8)}"
        self._pin_names[pin] = spec.image_facts.id
        # A pin gets no deadline, because it lives as long as this process. At a deadline another sandboxd of this
        # engine would remove the pin, and the image of running sandboxes could be removed.
        labels = {name: value for name, value in spec.labels.items() if name != LABEL_DEADLINE}
        try:
            await self._engine.pin(pin, spec.image_facts.id, labels, volumes)
            return {place: await self._engine.volume_path(volume) for place, volume in volumes.items()}
        except BaseException:
            # The engine may have made the container all the same. The next start makes another pin, and a sweep removes
            # pins whose names are not stored.
            self._pin_names.pop(pin, None)
            self._pins.pop(key, None)
            raise

    async def _run(self, work: Callable[[], None]) -> None:
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, work))

    def _open(self, sandbox: str, name: str, spec: SandboxSpec) -> int:
        """Make the folder of a sandbox. Return a descriptor of its lock file, which is locked."""
        # Rename the folder to its final name when it has the lock and the labels: a removal that finds the folder needs
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
        """Start a sandbox. `disks`: mounts of the disk of its workspace (if it has one), then of the layers below this
        disk.
        """
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
                    seccomp_bpf=self._filters.get((spec.is_root, spec.seccomp)),
                    apparmor=self.apparmor.profile,
                )
                (place / "config.json").write_text(json.dumps(bundle), encoding="utf-8")
                # Only the first disk belongs to this session alone. Layers may belong to several sessions.
                for index, disk in enumerate(disks):
                    set_attributes(disk, NOSUID | NODEV | (RDONLY if index else 0), namespace)
                content = _Content()
                if disks:
                    content = stack.enter_context(_divided(disks, namespace, sandbox, running.base, spec.is_root))
                skeleton = self._folder / skeleton_name(running.base)
                make_skeleton(skeleton, running.base)
                own = (_write_own_files(place, spec, running.base), skeleton)
                stacked = [_open_folder(folder, stack) for folder in own]
                lower: list[str | int] = [*content.changed, *stacked, *spec.image_facts.layers]
                root = mount_overlay(lower, namespace if self.unmapped is None else None, content.changes)
                stack.callback(os.close, root)
                (ROOTS / sandbox).mkdir()
                stack.callback((ROOTS / sandbox).rmdir)
                with attached(root, ROOTS / sandbox):
                    for folder, mount in content.folders.items():
                        attach_below(mount, root, folder.lstrip("/"))
                    for folder, volume in volumes.items():
                        # Without the id map, no id of the sandbox owns a file of the volume: its root user has no
                        # power over the modes, which hide the skills of other tenants.
                        mount = clone_tree(volume, RDONLY | NOSUID | NODEV)
                        stack.callback(os.close, mount)
                        attach_below(mount, root, folder.lstrip("/"))
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
        # Make the channels as socket pairs and not as paths of the runtime program, so that no other process can
        # connect.
        ours, theirs = socket.socketpair()
        running.streams, streams = socket.socketpair()
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with theirs, streams, ExitStack() as stack:
            stack.callback(os.close, writing)
            failure = stack.enter_context(ExitStack())
            failure.callback(os.close, reading)
            failure.callback(ours.close)
            self._call(sandbox, (theirs.fileno(), theirs.fileno(), writing, streams.fileno(), lock))
            process = int((place / "pid").read_text(encoding="ascii"))
            running.process = self._cgroups.open_process(sandbox, process)
            failure.pop_all()
        # crun creates this folder in place of the hidden groups of version 2, in this thread's namespace (mounts.py).
        shutil.rmtree(f"/sys/fs/cgroup/unified/{PARENT}", ignore_errors=True)
        ours.setblocking(False)
        return AttachedContainer(sandbox, ours, process, reading)

    def _call(self, sandbox: str, descriptors: Sequence[int]) -> None:
        """Run the program until the sandbox runs. `descriptors`: the program's, from 0; PID 1 gets the first four of
        them. Raises SandboxUnavailable with the end of the program's log.
        """
        place = self._sandboxes / sandbox
        log_file = place / "log"
        options = ["--root", str(self._state), "--log", str(log_file)]
        files = ["--bundle", str(place), "--pid-file", str(place / "pid")]
        try:
            if self.apparmor.profile is not None:
                start_next_program_unconfined()
            _run_to_end(
                [self._program, *options, "run", "--detach", "--preserve-fds", "1", *files, sandbox], descriptors
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
        """Keep the seccomp filter that crun has compiled, for later starts. runc does not write its filter."""
        compiled = self._state / sandbox / "seccomp.bpf"
        key = spec.is_root, spec.seccomp
        if key not in self._filters and compiled.exists():
            self._filters[key] = base64.b64encode(compiled.read_bytes()).decode("ascii")

    def _remove(self, sandbox: str) -> None:
        place = self._sandboxes / sandbox
        if not place.exists():  # another sandboxd may have removed the sandbox at its deadline
            self._forget(sandbox)
            return
        try:
            with self._locked(sandbox):
                running = self._running.get(sandbox)
                # Thaw first: with control groups of version 1, a frozen process does not react even to SIGKILL.
                with contextlib.suppress(FileNotFoundError):
                    self._cgroups.thaw(sandbox)
                if running is not None and running.process is not None:
                    _end_process(running.process)
                # Kill even if this process has not started the sandbox: an earlier sandboxd, which was killed, may have
                # started it.
                self._cgroups.kill(sandbox, _KILL_S)
                self._cgroups.remove(sandbox, _KILL_S)
                shutil.rmtree(self._state / sandbox, ignore_errors=True)
                # Rename the folder first: another removal, or one after kill -9, must not find a folder whose lock is
                # already deleted.
                shutil.rmtree(place.rename(place.with_name(f".{sandbox}")))
                # Close the descriptors while the lock is held, so that a second removal cannot use them.
                self._forget(sandbox)
        except (OSError, TimeoutError) as error:
            if place.exists():  # Otherwise another removal has already done this.
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
        if ended.streams is not None:
            ended.streams.close()
        for fd in (*ended.changes, *(() if ended.process is None else (ended.process,))):
            os.close(fd)
        self._ranges.give_back(ended.base)

    @contextmanager
    def _locked(self, sandbox: str) -> Iterator[None]:
        """Hold the lock of a sandbox. Raises OSError and TimeoutError."""
        # Open the lock file each time: with a shared descriptor, two removals of this process would not exclude each
        # other.
        fd = os.open(self._sandboxes / sandbox / "lock", os.O_RDWR | os.O_CLOEXEC)
        until = time.monotonic() + _LOCK_S
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        # The runtime program of a cancelled start still holds the lock.
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
            content = {"name": place.name, "labels": {}}  # The start was interrupted, or a removal has just ended.
        labels = {str(name): str(value) for name, value in content["labels"].items()}
        state = "running" if self._cgroups.exists(place.name) else "created"
        return ListedContainer(
            place.name, str(content["name"]), state, labels, float(labels.get(LABEL_CREATED_AT) or time.time())
        )


def _id_of(name: str) -> str:
    """Return the id of a sandbox: the random part of its name."""
    return name.rpartition("-")[2]


def _run_to_end(command: list[str], descriptors: Sequence[int]) -> None:
    """Run a program with these descriptors as its first ones, until it ends. Raises OSError and SubprocessError."""
    # The numbers matter, and the subprocess module cannot set them without a function that runs after a fork, which is
    # not safe with threads.
    with ExitStack() as stack:
        actions = []
        for number, descriptor in enumerate(descriptors):
            # Copy each one above the new numbers first: a new number may be the present one of another descriptor.
            copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, len(descriptors))
            stack.callback(os.close, copy)
            actions.append((os.POSIX_SPAWN_DUP2, copy, number))
        # Python ignores these signals, and a program would inherit that.
        ignored = (signal.SIGPIPE, signal.SIGXFSZ)
        pid = os.posix_spawn(command[0], command, copy_environment(), file_actions=actions, setsigdef=ignored)
    has_ended = False
    try:
        process = os.pidfd_open(pid)
        has_ended = _wait_ended(process, _START_S)
        os.close(process)
    finally:
        if not has_ended:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if not has_ended:
        raise subprocess.TimeoutExpired(command, _START_S)
    if status:
        raise subprocess.CalledProcessError(os.waitstatus_to_exitcode(status), command)


def _clone_workspace(folder: str) -> int:
    try:
        return clone_tree(folder)
    except OSError as error:
        raise SandboxUnavailable(
            f"the workspace {folder} cannot be mounted: {error}; run `toolcrew doctor` on this host"
        ) from error


@dataclass(frozen=True)
class _Content:
    """Parts of a session's disks, as descriptors. `folders`: the path in the sandbox of each mount. `changes`: the two
    folders of the overlay of the root file system; None if it is read-only. `changed`: folders with changes from the
    layers below, the newest first.
    """

    folders: Mapping[str, int] = field(default_factory=dict)
    changes: tuple[int, int] | None = None
    changed: Sequence[int] = ()


@contextmanager
def _divided(disks: Sequence[int], namespace: int, sandbox: str, base: int, is_root: bool) -> Iterator[_Content]:
    """Divide a session's disk into its folders (disks/base.py), and a folder for the changes of the root file system if
    `is_root`. All share the size of the disk. Each is stacked on the same folder of the layers. `base`: the host id of
    the sandbox's root user. Raises OSError.
    """
    disk, *layers = disks
    with ExitStack() as stack:
        # Attach the mount: the kernel clones a subfolder only from an attached mount.
        place = stack.enter_context(_attached_at(disk, f"{sandbox}.disk"))
        stack.enter_context(attached_together(layers, f"{sandbox}.layers"))
        lower = list(open_each(layers, FILES, stack))
        _prepare_disk(place, lower, base, is_root)
        files = place / FILES
        if lower:
            upper, work = (_open_folder(place / name, stack) for name in _FILES)
            overlay = mount_overlay(lower, namespace, (upper, work), FILES_OPTIONS)
            stack.callback(os.close, overlay)
            files = stack.enter_context(_attached_at(overlay, f"{sandbox}.files"))
        folders = {}
        for name, target in find_folders(is_root=is_root).items():
            folders[target] = clone_tree(files / name)
            stack.callback(os.close, folders[target])
        if not is_root:
            yield _Content(folders)
            return
        changes, work = (_open_folder(place / name, stack) for name in _CHANGES)
        yield _Content(folders, (changes, work), list(open_each(layers, CHANGES, stack)))


@contextmanager
def _attached_at(mount: int, name: str) -> Iterator[Path]:
    """Attach a mount to a new folder of this thread's namespace inside the block. Yield the folder."""
    place = ROOTS / name
    place.mkdir()
    try:
        with attached(mount, place):
            yield place
    finally:
        place.rmdir()


def _open_folder(path: Path, stack: ExitStack) -> int:
    fd = os.open(path, FOLDER_FLAGS)
    stack.callback(os.close, fd)
    return fd


def _prepare_disk(place: Path, lower: Sequence[int], base: int, is_root: bool) -> None:
    """Make the missing folders of a disk before its first use. The workspace gets the owner and mode that it has in the
    layers of `lower`, and so do the other folders; without layers, root of the sandbox owns its workspace.
    """
    if lower and not (place / _FILES[1]).exists():
        for name in find_folders(is_root=False):
            like = os.stat(name, dir_fd=lower[0], follow_symlinks=False)
            os.chown(place / FILES / name, like.st_uid, like.st_gid)
            (place / FILES / name).chmod(like.st_mode & 0o7777)
        _make_folder(place / _FILES[1], base, base, 0o755)
    if is_root and not (place / CHANGES).exists():
        if not lower:
            os.chown(place / FILES / "workspace", base, base)
        for name in reversed(_CHANGES):
            _make_folder(place / name, base, base, 0o755)


def _make_folder(place: Path, uid: int, gid: int, mode: int) -> None:
    """Make a folder of a disk, unless an earlier sandbox of the session has made it."""
    if place.exists():
        return
    # Give the folder its final name last: a start that is killed before must not leave a folder with the wrong owner or
    # mode.
    unfinished = place.with_name("unfinished")
    unfinished.mkdir(exist_ok=True)
    os.chown(unfinished, uid, gid)
    unfinished.chmod(mode)
    unfinished.rename(place)


def _write_own_files(place: Path, spec: SandboxSpec, base: int) -> Path:
    """Write the user database and the host name below the folder of a sandbox, in folders with the modes and owners
    that they have in the image: the skeleton would replace these. Return the folder as a layer. `base`: the host id of
    the sandbox's root user.
    """
    files = dict(spec.image_facts.accounts.items(is_root=spec.is_root))
    if spec.hostname != DEFAULT_HOSTNAME:
        files |= {name: text.encode() for name, text in host_files(spec.hostname).items()}
    layer = place / "own"
    (layer / "etc").mkdir(parents=True)
    for name, content in files.items():
        (layer / "etc" / name).write_bytes(content)
        (layer / "etc" / name).chmod(0o644)
    for path in (layer, layer / "etc"):
        path.chmod(0o755)
    found = {name: status for name in IMAGE_FOLDERS if (status := _find_folder(spec.image_facts.layers, name))}
    for name in found:
        (layer / name).mkdir(exist_ok=True)
    give_tree(layer, base)
    for name, status in found.items():
        # An owner without an id in the sandbox is shown as `nobody` there.
        uid, gid = (base + min(number, ID_RANGE - 2) for number in (status.st_uid, status.st_gid))
        os.chown(layer / name, uid, gid)
        (layer / name).chmod(stat.S_IMODE(status.st_mode) | IMAGE_FOLDERS[name])
    return layer


def _find_folder(layers: Sequence[str], name: str) -> os.stat_result | None:
    """Return the status of a top folder of an image, or None if the image has no such folder. `layers`: the top one
    first.
    """
    for layer in layers:
        with contextlib.suppress(FileNotFoundError):
            # A link is not followed: it may lead out of the layer.
            status = os.lstat(Path(layer, name))
            return status if stat.S_ISDIR(status.st_mode) else None
    return None


def _remove_unfinished(sandboxes: Path) -> None:
    """Remove unfinished folders of killed processes. Their sandboxes had not been started."""
    for place in sandboxes.glob(".*"):
        with contextlib.suppress(OSError):  # The process has just completed the folder.
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
    """Kill the PID 1 of a sandbox, and wait for its end. The kernel lets it end after all other processes of its
    namespace.
    """
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    if not _wait_ended(process, _KILL_S):
        raise TimeoutError(f"its PID 1 does not end in {_KILL_S:g} s")


def _wait_ended(process: int, seconds: float) -> bool:
    """Return whether the process of this descriptor (pidfd) has ended within the given time."""
    ended = select.poll()
    ended.register(process, select.POLLIN)
    return bool(ended.poll(seconds * 1000))


def _close_unused(starting: "asyncio.Future[AttachedContainer]") -> None:
    """Close the streams of a sandbox if the caller of the start was cancelled."""
    if not starting.cancelled() and starting.exception() is None:
        container = starting.result()
        container.sock.close()
        if container.stderr is not None:
            os.close(container.stderr)
