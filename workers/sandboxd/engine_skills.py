"""The volume that the sandboxes of one sandboxd read skills from, as the engine is asked for it. Blocks, and raises what the SDK raises."""

import contextlib
import secrets
from collections.abc import Mapping
from typing import IO, Final

import docker
import docker.errors

from workers.sandboxd.engine_volumes import LABEL_PRODUCT, remove_old_fillers
from workers.sandboxd.hardening import SKILLS_FOLDER

PRODUCT_SKILLS: Final = "skills"


def make_volume(api: docker.APIClient, name: str, labels: Mapping[str, str]) -> None:
    """An empty one."""
    api.create_volume(name, driver="local", labels={**labels, LABEL_PRODUCT: PRODUCT_SKILLS})


def list_volumes(api: docker.APIClient, label: str) -> dict[str, Mapping[str, str]]:
    """Those with that label (`name=value`): their labels by their names."""
    listed = api.volumes(filters={"label": [f"{LABEL_PRODUCT}={PRODUCT_SKILLS}", label]})["Volumes"] or []
    return {str(volume["Name"]): dict(volume["Labels"] or {}) for volume in listed}


def remove_volume(api: docker.APIClient, name: str) -> None:
    """One that is gone is fine; one that a container has is refused by the engine."""
    with contextlib.suppress(docker.errors.NotFound):
        api.remove_volume(name)


def fill_volume(api: docker.APIClient, name: str, image: str, archive: IO[bytes]) -> None:
    """Unpack a tar archive, whose names begin with the folder's, by a container of the image that is never started."""
    remove_old_fillers(api, PRODUCT_SKILLS)
    mounts = [{"Type": "volume", "Source": name, "Target": SKILLS_FOLDER, "VolumeOptions": {"NoCopy": True}}]
    config = {
        "Image": image,
        "NetworkDisabled": True,
        "Labels": {LABEL_PRODUCT: PRODUCT_SKILLS},
        "HostConfig": {"NetworkMode": "none", "Mounts": mounts},
    }
    container = str(api.create_container_from_config(config, f"toolcrew-skill-{secrets.token_hex(8)}")["Id"])  # type: ignore[no-untyped-call]
    try:
        # From above: the engine leaves the mode of the folder itself, into which it unpacks, as it was.
        api.put_archive(container, "/", archive)
    finally:
        with contextlib.suppress(docker.errors.NotFound):
            api.remove_container(container, force=True)
