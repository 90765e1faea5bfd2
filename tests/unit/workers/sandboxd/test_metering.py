"""Attribution of what a sandbox uses: every unit counts once, for the calls that run, and for the session."""

from pathlib import Path

import pytest

from toolcrew.workers.sandboxd.metering import SandboxMeter, UsageReader, UsageReading, UsageTotals


class Counters(UsageReader):
    """The counters of a sandbox, set by a test."""

    def __init__(self) -> None:
        self.now = UsageReading()
        self.peak = 0

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


def test_overlapping_calls_share_usage_and_idle_usage_goes_to_the_session(counters: Counters) -> None:
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
    assert totals.amounts == [1000, 11, 7, 8, 0]


def test_session_usage_is_the_sum_of_its_sandboxes_until_they_close(counters: Counters) -> None:
    totals, meters = UsageTotals(), [SandboxMeter(counters), SandboxMeter(Counters())]
    for meter in meters:
        meter.bill(totals)
        counters.now = UsageReading(50, 0, 0)
        meter.close()
        counters.now = UsageReading(90, 0, 0)
        meter.update()
    assert totals.amounts == [50, 0, 0, 0, 0]


def test_sandbox_without_counters_reports_time_network_and_streams_only() -> None:
    meter, totals = SandboxMeter(None), UsageTotals()
    meter.bill(totals)
    call = meter.begin()
    meter.network_bytes, meter.stream_bytes = 3, 5
    assert meter.end(call) is None
    assert totals.amounts == [0, 0, 0, 3, 5]
    assert totals.describe()["sandbox_s"] > 0


@pytest.mark.parametrize("version", [1, 2])
def test_usage_reader_counts_new_and_ended_processes_once(tmp_path: Path, version: int) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    group = root / ("cpuacct/box" if version == 1 else "box")
    folders = {group, root / "memory/box", root / "pids/box"} if version == 1 else {group}

    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(written_bytes: dict[int, int], tasks: int | None = None) -> int:
        """Set the processes with their accounts, and return the bytes that the reader finds."""
        for process, amount in written_bytes.items():
            account = f"rchar: 1\nwchar: 1\nsyscr: 1\nsyscw: 1\nread_bytes: 2\nwrite_bytes: {amount}\n"
            write(proc / str(process) / "io", f"{account}cancelled_write_bytes: 0\n")
        write(group / "cgroup.procs", "".join(f"{process}\n" for process in written_bytes))
        write((root / "pids/box" if version == 1 else group) / "pids.current", f"{tasks or len(written_bytes)}\n")
        return reader.read().written_bytes if tasks is None else 0

    for folder in folders:
        for name in ("cpuacct.usage", "memory.max_usage_in_bytes", "memory.peak", "pids.current"):
            write(folder / name, "0\n")
    write(group / "cpu.stat", "usage_usec 0\n")
    v1 = "4:pids:/box\n3:memory:/box\n2:cpu,cpuacct:/box\n"
    write(proc / "1/cgroup", v1 if version == 1 else "0::/box\n")
    run({}, tasks=1)
    reader = UsageReader("box", 1, proc, root)
    assert run({1: 5}) == 5
    assert run({1: 7}) == 7
    assert run({1: 7, 2: 10}) == 17
    assert run({1: 17}) == 17
    many = {process: 1 for process in range(2, 40)}
    assert run({1: 17} | many) == 17 + len(many)
    assert run({1: 18} | many) == 18 + len(many)
    reader.close()
    assert reader.read().written_bytes == 18 + len(many)
