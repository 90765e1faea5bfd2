"""The pool that runs a worker's calls, and the pool's name in Celery."""

import socket
import subprocess
import sys

from pydantic import SecretStr

from contract.settings import BrokerSettings
from tests.stack import ROOT
from workers.celery_edge.app import reserve_node_name


def test_two_workers_of_one_name_on_a_machine_have_two_names_and_a_free_one_is_taken_again() -> None:
    """Flower merges workers of one name. A second process proves that the name of a dead worker is free."""
    broker, other = (
        BrokerSettings(redis_url=SecretStr(f"redis://:secret@localhost:6379/{number}")) for number in (7, 8)
    )
    machine = socket.gethostname()
    code = (
        "from contract.settings import BrokerSettings; from workers.celery_edge.app import reserve_node_name; "
        "print(reserve_node_name('web-x', BrokerSettings(redis_url='redis://:other@localhost:6379/7')), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline().strip() == f"web-x@{machine}"
        assert reserve_node_name("web-x", broker) == f"web-x-2@{machine}"
        assert reserve_node_name("web-x", other) == f"web-x@{machine}"
        first.kill()
    assert reserve_node_name("web-x", broker) == f"web-x@{machine}"
