"""Which connections of previews are in the audit log."""

import pytest

from toolcrew.orchestrator.api import previews
from toolcrew.orchestrator.api.previews import RECORD_EVERY_S, RecordedPorts
from toolcrew.orchestrator.streams import StreamTarget
from toolcrew.store.audit import Actor

ACTOR = Actor(key="k1", role="operator", tenant="ops")
ONE, OTHER = StreamTarget("acme", "s1", ACTOR), StreamTarget("acme", "s2", ACTOR)


def test_one_connection_to_a_port_is_recorded_in_an_interval() -> None:
    now = 0.0
    ports = RecordedPorts(lambda: now)
    assert [ports.is_due(ONE, 80), ports.is_due(ONE, 80), ports.is_due(ONE, 81), ports.is_due(OTHER, 80)] == [
        True,
        False,
        True,
        True,
    ]
    now = RECORD_EVERY_S
    assert [ports.is_due(ONE, 80), ports.is_due(ONE, 80)] == [True, False]


def test_the_memory_of_recorded_ports_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previews, "_MAX_RECORDED", 2)
    ports = RecordedPorts(lambda: 0.0)
    assert [ports.is_due(ONE, port) for port in (1, 2, 3, 3, 1)] == [True, True, True, False, True]
