"""What sandboxd measures about a call, without a queue and workers: also for hosts on which no whole stack starts."""

import pytest

from tests.support.stack.daemons import Daemons, bash

pytestmark = [pytest.mark.stack, pytest.mark.usefixtures("needs_root")]

MIB = 1024 * 1024
BUSY_S = 1.0
BUSY = f"python3 -c 'import time\nwhile time.process_time() < {BUSY_S}: pass'"
FULL = f"head -c {8 * MIB} /dev/zero >file; kept=$(head -c {32 * MIB} /dev/zero | tr '\\0' a)"


def test_a_result_has_the_processor_time_memory_and_written_bytes_of_its_call(daemons: Daemons) -> None:
    with daemons.start(sandbox_workspace="image").client() as client:
        name = client.open("acme", "s1")
        busy, full, idle = (
            bash(client, name, script, timeout_s=120.0).done["usage"] for script in (BUSY, FULL, "true")
        )
        client.close(name)
    assert busy["cpu_s"] >= BUSY_S
    assert idle["cpu_s"] < BUSY_S
    assert full["memory_peak_bytes"] > 32 * MIB
    assert full["written_bytes"] >= 8 * MIB > idle["written_bytes"]
