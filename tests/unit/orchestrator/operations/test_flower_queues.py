"""The queues that Flower's page Broker lists."""

from types import SimpleNamespace
from typing import Any

from toolcrew.orchestrator.operations.flower import LiveQueues


def test_only_queues_of_online_workers_are_listed() -> None:
    workers = {
        "live@m": {"active_queues": [{"name": "host.a.b2"}, {"name": "pool.web"}]},
        "dead@m": {"active_queues": [{"name": "host.a.b1"}]},
    }
    online = {
        "live@m": SimpleNamespace(alive=True),
        "dead@m": SimpleNamespace(alive=False),
        "new@m": SimpleNamespace(alive=True),
    }
    page: Any = SimpleNamespace(
        application=SimpleNamespace(workers=workers, events=SimpleNamespace(state=SimpleNamespace(workers=online)))
    )
    assert LiveQueues.get_active_queue_names(page) == ["host.a.b2", "pool.web"]
