"""A containerd with the image service of Kubernetes, without a kubelet and without pods."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docker import APIClient

from tests.support.sandboxd.containers import IMAGE
from tests.support.stack.stack import UP_S, end_process, missing
from tests.support.stack.waiting import wait_until
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.disks.mounts import list_mounts
from toolcrew.workers.sandboxd.runtime.containerd import KUBERNETES, SNAPSHOTTER, Containerd


class ContainerdServer:
    """The `containerd` of this host in a folder of its own. It has the sandbox image."""

    def __init__(self, api: APIClient, folder: Path) -> None:
        program = shutil.which("containerd")
        if program is None or shutil.which("ctr") is None or os.geteuid() != 0:
            missing("no containerd, or not root: apt-get install containerd")
            raise AssertionError
        self.address = str(folder / "containerd.sock")
        self.client = Containerd(self.address, KUBERNETES)
        self._folder = folder
        self._log = folder / "log"
        places = {"root": str(folder / "root"), "state": str(folder / "state")}
        # Simple values of JSON are values of TOML too.
        lines = [f"{name} = {json.dumps(value)}" for name, value in places.items()]
        (folder / "config.toml").write_text(
            "\n".join(["version = 2", *lines, "[grpc]", f"address = {json.dumps(self.address)}"])
        )
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [program, "--config", str(folder / "config.toml")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(self._answers, UP_S, lambda: self._log.read_text(errors="replace"))
        with tempfile.TemporaryFile(dir=folder) as saved:
            for chunk in api.get_image(IMAGE):  # type: ignore[no-untyped-call]
                saved.write(chunk)
            saved.seek(0)
            self._ctr("images", "import", "-", stdin=saved)

    def has(self, image: str) -> bool:
        reply = self.client.call("runtime.v1.ImageService/ImageStatus", {"image": {"image": image}})
        return bool(reply.HasField("image"))

    def remove(self, image: str) -> None:
        """Remove an image, as the kubelet does when the disk is full."""
        self.client.call("runtime.v1.ImageService/RemoveImage", {"image": {"image": image}})

    def tag(self, image: str, name: str) -> None:
        self._ctr("images", "tag", image, name)

    def leases(self) -> list[str]:
        return [name for name, _, _ in self.client.list_held({})]

    def views(self) -> list[str]:
        """Return the snapshots that are no layers of images."""
        listed = self._ctr("snapshots", "--snapshotter", SNAPSHOTTER, "list")
        return [line.split()[0] for line in listed.splitlines()[1:] if not line.startswith("sha256:")]

    def close(self) -> None:
        end_process(self._process)
        below = [place for place in list_mounts() if place.is_relative_to(self._folder)]
        assert below == [], f"mounts were left: {below}"

    def _ctr(self, *arguments: str, stdin: Any = subprocess.DEVNULL) -> str:
        argv = ["ctr", "--address", self.address, "--namespace", KUBERNETES, *arguments]
        return subprocess.run(argv, stdin=stdin, capture_output=True, text=True, timeout=UP_S, check=True).stdout

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text(errors="replace")
        with contextlib.suppress(SandboxUnavailable):
            self.has("x")
            return True
        return False


@contextlib.contextmanager
def open_containerd(api: APIClient) -> Iterator[ContainerdServer]:
    """Yield a containerd. On exit it ends, and its folder is removed."""
    with tempfile.TemporaryDirectory(prefix="tcc-", dir="/tmp") as folder:  # the path of a socket is limited
        server = ContainerdServer(api, Path(folder))
        try:
            yield server
        finally:
            server.close()
