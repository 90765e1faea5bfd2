"""The signed options of a session."""

import pytest

from tests.support.records.builders import KEY
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.session_locations import LocationState, SessionLocation, open_start


@pytest.mark.parametrize("options", ['{"options": {"cpus": 1}}', '{"tool_config": {"quote": "private"}}', "["])
def test_unreadable_options_are_an_error_that_does_not_quote_them(options: str) -> None:
    start = KEY.seal("start acme s1", options)
    location = SessionLocation(state=LocationState.OPEN, queue="host.a.boot", fence=1, start=start)
    with pytest.raises(SandboxUnavailable, match="open a new session") as raised:
        open_start(KEY, "acme", "s1", location)
    assert "private" not in str(raised.value)
    assert raised.value.__cause__ is None
