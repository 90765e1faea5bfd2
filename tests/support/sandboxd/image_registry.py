"""A registry of images on the loopback address, and tiny images in it."""

import contextlib
import json
import re
import secrets
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import docker.errors
from docker import APIClient

from tests.support.sandboxd.archives import build_tar
from tests.support.stack.stack import end_process, missing
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.orchestrator.operations.ports import reserve_port

USER, PASSWORD = "robot", "a-test-password"
_PASSWORD_HASH = "$2b$04$yyA9tykbobZ/U5ywVI0VwuOr753iIPobYxl4mo/P3ROmFVGADu0PW"
"""The password as bcrypt, the only kind that the registry reads."""


class ImageRegistry:
    """Debian's `docker-registry` in a folder of a test. `needs_login`: only USER with PASSWORD may read and write."""

    def __init__(self, api: APIClient, folder: Path, *, needs_login: bool = False) -> None:
        program = shutil.which("docker-registry")
        if program is None:
            missing("no docker-registry: apt-get install docker-registry")
            raise AssertionError
        self._api = api
        self._login = {"username": USER, "password": PASSWORD} if needs_login else None
        self._log = folder / "registry.log"
        self.address = f"127.0.0.1:{reserve_port()}"
        self.repository = f"{self.address}/team-{secrets.token_hex(4)}"
        """Begin of the names of this test's images. The engine keeps images between tests."""
        self._identity = secrets.token_bytes(8)
        config: dict[str, Any] = {
            "version": "0.1",
            "log": {"accesslog": {"disabled": False}, "level": "error"},
            "storage": {"filesystem": {"rootdirectory": str(folder / "registry")}},
            "http": {"addr": self.address},
        }
        if needs_login:
            passwords = folder / "htpasswd"
            passwords.write_text(f"{USER}:{_PASSWORD_HASH}\n")
            config["auth"] = {"htpasswd": {"realm": "test", "path": str(passwords)}}
        path = folder / "registry.json"
        path.write_text(json.dumps(config))  # JSON is YAML too
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [program, "serve", str(path)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        wait_until(self._answers, SOON_S, lambda: self._log.read_text(errors="replace"))

    def push(self, name: str, files: Mapping[str, bytes], *, keep: bool = False, changes: Sequence[str] = ()) -> str:
        """Make an image of these files, push it as `name` (with a tag) and return its complete name. The engine
        forgets it unless `keep` is set. `changes`: lines of a Dockerfile.

        The layer differs from those of every other registry. A layer that an image of an ended run left in the engine
        would not be pulled.
        """
        repository, _, tag = f"{self.repository}/{name}".rpartition(":")
        self._api.import_image(
            build_tar(*files.items(), ("registry", self._identity)), repository, tag, changes=list(changes)
        )
        answer = self._api.push(repository, tag, auth_config=self._login)
        assert "error" not in str(answer), answer
        full = f"{repository}:{tag}"
        if not keep:
            self._api.remove_image(full)
        return full

    def count_pulls(self, name: str) -> int:
        """Return how many times the layers of an image were fetched. Images of tests have one layer and a
        configuration.
        """
        path = re.escape(name.partition("/")[2].partition(":")[0])
        return len(re.findall(rf'"GET /v2/{path}/blobs/', self._log.read_text(errors="replace"))) // 2

    def remove_images(self) -> None:
        """Remove the names of this registry from the engine."""
        for image in self._api.images():
            for name in [*(image["RepoTags"] or ()), *(image["RepoDigests"] or ())]:
                if name.startswith(f"{self.repository}/"):
                    with contextlib.suppress(docker.errors.ImageNotFound):
                        self._api.remove_image(name, force=True)

    def close(self) -> None:
        end_process(self._process)

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text(errors="replace")
        try:
            urllib.request.urlopen(f"http://{self.address}/v2/", timeout=5).close()
        except urllib.error.HTTPError as error:
            return error.code == 401
        except OSError:
            return False
        return True


@contextlib.contextmanager
def open_registry(api: APIClient, folder: Path, *, needs_login: bool = False) -> Iterator[ImageRegistry]:
    """Yield a registry. On exit the registry ends, and its images are removed from the engine."""
    registry = ImageRegistry(api, folder, needs_login=needs_login)
    try:
        yield registry
    finally:
        registry.close()
        registry.remove_images()
