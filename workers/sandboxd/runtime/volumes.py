"""Volumes that the engine fills: the guest for images that have none, and the skills. The functions block and raise the
SDK's errors.

Several sandboxds may fill the same guest volume. The name of the filler container is the lock: the engine accepts a
name once. A filler that was killed is removed after a while.
"""

import contextlib
import hashlib
import io
import secrets
import tarfile
import time
from collections.abc import Iterator, Mapping
from typing import IO, Final

import docker
import docker.errors
import structlog

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.image_names import advise_missing
from toolcrew.contract.settings import DEFAULT_IMAGE
from toolcrew.workers.sandboxd.runtime.hardening import GUEST_FOLDER, SKILLS_FOLDER, AccountFiles, AccountVolume

log = structlog.get_logger(__name__)

LABEL_PRODUCT: Final = "toolcrew.product"
PRODUCT_GUEST: Final = "guest"
LABEL_GUEST: Final = "toolcrew.guest"
"""Label of images with the guest (sandbox-images/base/Dockerfile)."""

_FILLER_LIFE_S: Final = 30.0
_FILLER_WAIT_S: Final = 40.0
_FILLER_PAUSE_S: Final = 0.1
_MAX_KNOWN: Final = 1000
PRODUCT_SKILLS: Final = "skills"
PRODUCT_ACCOUNTS: Final = "accounts"


class GuestVolumes:
    """Creates and verifies guest volumes. Remembers which volumes this process has verified. `ensure` blocks and raises
    the SDK's errors.
    """

    def __init__(self) -> None:
        self._filled: dict[str, str] = {}

    def ensure(self, api: docker.APIClient, image: str) -> str:
        """Return the name of a volume that holds the guest of `image`, or of DEFAULT_IMAGE if `image` has none. Raises
        SandboxUnavailable when an image is missing or has no guest.
        """
        image, identity = _find_guest(api, image)
        name = _name_of(identity)
        # Verify a volume with another creation time again: the start of a container recreates a missing volume empty.
        if name not in self._filled or self._filled[name] != _read_created_at(api, name):
            _fill(api, image, identity, name)
            self._filled[name] = _read_created_at(api, name)
            _remove_orphans(api)
        return name


class AccountVolumes:
    """Creates the volumes with the user databases of images (AccountFiles), one for each content. The methods block and
    raise the SDK's errors.
    """

    def __init__(self) -> None:
        self._filled: dict[str, AccountVolume] = {}

    def ensure(self, api: docker.APIClient, image: str, accounts: AccountFiles) -> AccountVolume:
        """Return the volume with these files. `image`: any image of the engine."""
        content = b"\0".join(part for item in accounts.items() for part in (item[0].encode(), item[1]))
        name = f"toolcrew-accounts-{hashlib.sha256(content).hexdigest()[:24]}"
        created_at = _read_created_at(api, name)
        volume = self._filled.get(name)
        if volume is None or volume.created_at != created_at:
            _remove_unused_accounts(api)
            api.create_volume(name, driver="local", labels={LABEL_PRODUCT: PRODUCT_ACCOUNTS})
            fill_volume(api, name, image, _pack_accounts(accounts))
            found = api.inspect_volume(name)
            volume = AccountVolume(name, str(found["Mountpoint"]), str(found["CreatedAt"]))
            if len(self._filled) >= _MAX_KNOWN:
                self._filled.clear()
            self._filled[name] = volume
        return volume


def _remove_unused_accounts(api: docker.APIClient) -> None:
    """Remove the volumes that no container uses. The engine refuses to remove others."""
    listed = api.volumes(filters={"label": [f"{LABEL_PRODUCT}={PRODUCT_ACCOUNTS}"]})["Volumes"] or []
    for volume in listed:
        with contextlib.suppress(docker.errors.APIError):
            api.remove_volume(str(volume["Name"]))


def _pack_accounts(accounts: AccountFiles) -> IO[bytes]:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in accounts.items():
            member = tarfile.TarInfo(f"{SKILLS_FOLDER.lstrip('/')}/{name}")
            member.mode, member.size = 0o644, len(content)
            archive.addfile(member, io.BytesIO(content))
    packed.seek(0)
    return packed


def _find_guest(api: docker.APIClient, image: str) -> tuple[str, str]:
    """Return the name and the content id of the image with the guest."""
    for name in (image, DEFAULT_IMAGE):
        try:
            found = api.inspect_image(name)  # type: ignore[no-untyped-call]
        except docker.errors.ImageNotFound as error:
            raise SandboxUnavailable(
                f"the engine has no image {name}, from which other images get the guest: {advise_missing(name)}"
            ) from error
        if LABEL_GUEST in ((found.get("Config") or {}).get("Labels") or {}):
            return name, str(found["Id"])
    raise SandboxUnavailable(
        f"neither {image} nor {DEFAULT_IMAGE} has the guest: build {DEFAULT_IMAGE} with scripts/build-image"
    )


def _name_of(image: str) -> str:
    return f"toolcrew-guest-{image.rpartition(':')[2][:12]}"


def _remove_orphans(api: docker.APIClient) -> None:
    """Remove volumes of images that the engine no longer has. The engine refuses to remove a volume that a container
    uses.
    """
    # List volumes before images: if a volume is created between the two lists, the list of images contains its image.
    listed = api.volumes(filters={"label": [f"{LABEL_PRODUCT}={PRODUCT_GUEST}"]})["Volumes"] or []
    current_names = {_name_of(str(image["Id"])) for image in api.images(all=True)}
    for name in sorted({str(volume["Name"]) for volume in listed} - current_names):
        try:
            api.remove_volume(name)
        except docker.errors.APIError as error:
            log.info("guest_volume_not_removed", volume=name, error=str(error.explanation or error))
        else:
            log.info("guest_volume_removed", volume=name)


def _fill(api: docker.APIClient, image: str, identity: str, volume: str) -> None:
    remove_old_fillers(api, PRODUCT_GUEST)
    # The name is the lock: the engine gives it to only one sandboxd that fills this volume.
    with filler(api, identity, f"toolcrew-fill-{volume}", None) as own:
        expected = _read_guest(api, own)
        if not expected:
            raise SandboxUnavailable(
                f"the image {image} has nothing in {GUEST_FOLDER}: build it again with scripts/build-image"
            )
        for _ in range(2):
            api.create_volume(volume, driver="local", labels={LABEL_PRODUCT: PRODUCT_GUEST})
            # The engine copies the image's folder into an empty volume when it creates a container.
            with filler(api, identity, f"toolcrew-fill-{secrets.token_hex(8)}", volume) as filled:
                if _read_guest(api, filled) == expected:
                    return
            with contextlib.suppress(docker.errors.NotFound):
                api.remove_volume(volume)  # left by an interrupted fill; refused while a sandbox uses the volume
    raise SandboxUnavailable(
        f"the volume {volume} does not accept the content of {GUEST_FOLDER} in {image}: check the engine's disk"
    )


def _read_created_at(api: docker.APIClient, volume: str) -> str:
    """Return the creation time of the volume; empty if the volume does not exist."""
    try:
        return str(api.inspect_volume(volume)["CreatedAt"])
    except docker.errors.NotFound:
        return ""


@contextlib.contextmanager
def filler(api: docker.APIClient, image: str, name: str, volume: str | None) -> Iterator[str]:
    """Create a filler: a container of the image that is never started, with the volume at the guest's folder. Wait
    while another container has the filler's name.
    """
    mounts = [] if volume is None else [{"Type": "volume", "Source": volume, "Target": GUEST_FOLDER}]
    # The engine creates no container without a command, and an image may have none.
    body = {"Image": image, "Cmd": ["fill"], "NetworkDisabled": True, "Labels": {LABEL_PRODUCT: PRODUCT_GUEST}}
    config = {**body, "HostConfig": {"NetworkMode": "none", "Mounts": mounts}}
    give_up_at = time.monotonic() + _FILLER_WAIT_S
    while True:
        try:
            container = str(api.create_container_from_config(config, name)["Id"])  # type: ignore[no-untyped-call]
            break
        except docker.errors.APIError as error:
            if error.status_code != 409 or time.monotonic() > give_up_at:
                raise
        remove_old_fillers(api, PRODUCT_GUEST)
        time.sleep(_FILLER_PAUSE_S)
    try:
        yield container
    finally:
        _remove(api, container)


def _read_guest(api: docker.APIClient, container: str) -> Mapping[str, str]:
    """Return the content of the guest's folder: path -> type, mode, owner and digest. Empty when there is none."""
    try:
        chunks, _ = api.get_archive(container, GUEST_FOLDER)
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
            return {member.name: _describe_member(archive, member) for member in archive if not member.isdir()}
    except docker.errors.NotFound:
        return {}


def remove_old_fillers(api: docker.APIClient, product: str) -> None:
    """Remove the fillers of killed processes."""
    for container in api.containers(all=True, filters={"label": [f"{LABEL_PRODUCT}={product}"]}):
        if container["Created"] < time.time() - _FILLER_LIFE_S:
            _remove(api, str(container["Id"]))


def _describe_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    content = archive.extractfile(member) if member.isfile() else None
    digest = hashlib.sha256(content.read()).hexdigest() if content is not None else member.linkname
    return f"{member.type!r} {member.mode:o} {member.uid}:{member.gid} {digest}"


def _remove(api: docker.APIClient, container: str) -> None:
    """Remove a container that was never started. Does nothing if another sandboxd has removed it, or is removing it."""
    try:
        api.remove_container(container, force=True)
    except docker.errors.APIError as error:
        if error.status_code not in (404, 409):
            raise


def make_volume(api: docker.APIClient, name: str, labels: Mapping[str, str]) -> None:
    """Create an empty volume."""
    api.create_volume(name, driver="local", labels={**labels, LABEL_PRODUCT: PRODUCT_SKILLS})


def list_volumes(api: docker.APIClient, label: str) -> dict[str, Mapping[str, str]]:
    """Return the labels of the volumes with that label (`name=value`), by volume name."""
    listed = api.volumes(filters={"label": [f"{LABEL_PRODUCT}={PRODUCT_SKILLS}", label]})["Volumes"] or []
    return {str(volume["Name"]): dict(volume["Labels"] or {}) for volume in listed}


def remove_volume(api: docker.APIClient, name: str) -> None:
    """Remove a volume. A missing volume is ignored. The engine refuses while a container uses the volume."""
    with contextlib.suppress(docker.errors.NotFound):
        api.remove_volume(name)


def fill_volume(api: docker.APIClient, name: str, image: str, archive: IO[bytes]) -> None:
    """Unpack a tar archive through a container of the image that is never started. Each name in
    the archive begins with the name of the folder at which the volume is mounted.
    """
    remove_old_fillers(api, PRODUCT_SKILLS)
    mounts = [{"Type": "volume", "Source": name, "Target": SKILLS_FOLDER, "VolumeOptions": {"NoCopy": True}}]
    config = {
        "Image": image,
        "Cmd": ["fill"],
        "NetworkDisabled": True,
        "Labels": {LABEL_PRODUCT: PRODUCT_SKILLS},
        "HostConfig": {"NetworkMode": "none", "Mounts": mounts},
    }
    container = str(api.create_container_from_config(config, f"toolcrew-skill-{secrets.token_hex(8)}")["Id"])  # type: ignore[no-untyped-call]
    try:
        # Unpack at the root: the engine does not change the mode of the folder into which it unpacks.
        api.put_archive(container, "/", archive)
    finally:
        _remove(api, container)
