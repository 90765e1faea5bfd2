"""Fixtures of attack tests: the engine, boxes under the real profile, and a separate sandboxd."""

from collections.abc import Iterator

import pytest
from docker import APIClient

from tests.support.guest.guest_tools import guest, shared_guest, tools  # noqa: F401  # fixtures
from tests.support.sandboxd.attack_sandboxd import OwnSandboxd, open_own_sandboxd
from tests.support.sandboxd.containers import Box, OciBox, open_box, open_engine, open_oci_box


@pytest.fixture(scope="session")
def engine() -> APIClient:
    return open_engine()


@pytest.fixture(scope="session", params=["engine", "oci"])
def start(request: pytest.FixtureRequest) -> str:
    """Return what starts the sandboxes: the Docker engine, or sandboxd itself."""
    return str(request.param)


@pytest.fixture
def box(start: str, engine: APIClient) -> Iterator[Box | OciBox]:
    with open_box(engine) if start == "engine" else open_oci_box() as opened:
        yield opened


@pytest.fixture(scope="module")
def shared_box(start: str, engine: APIClient) -> Iterator[Box | OciBox]:
    """Return one box for the attacks of a file that leave nothing behind or that clean up."""
    with open_box(engine) if start == "engine" else open_oci_box() as opened:
        yield opened


@pytest.fixture(scope="session")
def sandboxd(start: str, engine: APIClient) -> Iterator[OwnSandboxd]:
    """Return a sandboxd that no test kills."""
    with open_own_sandboxd(engine, {"TOOLCREW_SANDBOX_START": start}) as opened:
        yield opened
