"""Fixtures: a stream server with real files."""

from collections.abc import Iterator

import pytest

from tests.support.guest.stream_client import RunningServer, running_stream_server

_TOOLS = "from guest.streams import file_requests; file_requests.TOOLS = b'/bin'"


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A new stream server. Other users may enter its folders."""
    base = tmp_path_factory.mktemp("sandbox")
    for folder in (base, base.parent, base.parent.parent):
        folder.chmod(0o755)
    with running_stream_server(base, _TOOLS) as running:
        yield running
