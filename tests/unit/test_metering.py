"""Attribution of what a sandbox uses: every unit counts once, for the calls that run, and for the session."""

import pytest

from workers.sandboxd.metering import SandboxMeter, UsageTotals
from workers.sandboxd.runtime.usage import UsageReader, UsageReading


class Counters(UsageReader):
    """The counters of a sandbox, set by a test."""

    def __init__(self) -> None:
        self.now, self.peak = UsageReading(), 0

    def read(self, *, has_disks: bool = True) -> UsageReading:
        return self.now

    def read_peak(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = 0

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def counters() -> Counters:
    return Counters()


def test_calls_that_overlap_share_and_time_between_calls_is_the_sessions(counters: Counters) -> None:
    meter, totals = SandboxMeter(counters), UsageTotals()
    counters.now = UsageReading(100, 10, 0)  # the start of the sandbox
    meter.bill(totals)
    first = meter.begin()
    counters.now = UsageReading(150, 10, 7)
    second = meter.begin()
    counters.now, meter.network_bytes = UsageReading(251, 10, 7), 8
    used_second = meter.end(second)
    counters.now, counters.peak = UsageReading(300, 11, 7), 4096
    used_first = meter.end(first)
    counters.now = UsageReading(1000, 11, 7)  # a background job
    meter.update()

    assert used_first is not None
    assert used_second is not None
    assert (used_first.cpu_s, used_first.read_bytes, used_first.written_bytes) == (149e-6, 1, 7)
    assert (used_second.cpu_s, used_second.written_bytes) == (51e-6, 0)
    assert used_first.network_bytes + used_second.network_bytes == 8
    assert (used_first.memory_peak_bytes, used_second.memory_peak_bytes) == (4096, 0)
    assert totals.amounts == [1000, 11, 7, 8]


def test_a_session_sums_its_sandboxes_and_an_ended_one_counts_no_more(counters: Counters) -> None:
    totals, meters = UsageTotals(), [SandboxMeter(counters), SandboxMeter(Counters())]
    for meter in meters:
        meter.bill(totals)
        counters.now = UsageReading(50, 0, 0)
        meter.close()
        counters.now = UsageReading(90, 0, 0)
        meter.update()
    assert totals.amounts == [50, 0, 0, 0]


def test_a_sandbox_that_cannot_be_measured_counts_time_and_network() -> None:
    meter, totals = SandboxMeter(None), UsageTotals()
    meter.bill(totals)
    call = meter.begin()
    meter.network_bytes = 3
    assert meter.end(call) is None
    assert totals.amounts == [0, 0, 0, 3]
    assert totals.describe()["sandbox_s"] > 0
