"""Containers that fill volumes are removed, even if another process removes them at the same time."""

from typing import Any

import docker
import pytest
import requests

from toolcrew.workers.sandboxd.runtime.volumes import PRODUCT_GUEST, remove_old_fillers


class FakeEngine:
    """An engine with one old filler. Each removal ends with the status."""

    def __init__(self, status: int) -> None:
        self._response = requests.Response()
        self._response.status_code = status

    def containers(self, **_: Any) -> list[dict[str, Any]]:
        return [{"Id": "filler", "Created": 0}]

    def remove_container(self, *_: Any, **__: Any) -> None:
        raise docker.errors.APIError("refused", response=self._response)


@pytest.mark.parametrize("status", [404, 409])
def test_filler_removed_by_another_sandboxd_is_no_error(status: int) -> None:
    remove_old_fillers(FakeEngine(status), PRODUCT_GUEST)  # type: ignore[arg-type]


def test_failed_filler_removal_is_reported() -> None:
    with pytest.raises(docker.errors.APIError):
        remove_old_fillers(FakeEngine(500), PRODUCT_GUEST)  # type: ignore[arg-type]
