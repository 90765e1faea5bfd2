"""Unlimited output: one huge stream, one huge line, or many small pieces. The memory of guest, sandboxd and worker
stays constant, and dropped output is reported.
"""

import threading

import pytest

from tests.support.sandboxd.attack_sandboxd import CAPTURE, HostileSession, OwnSandboxd
from toolcrew.workers.sandbox_client import SandboxClient

pytestmark = pytest.mark.stack

MIB = 1 << 20
FLAT_BYTES = 12 * MIB
FLOODS = {
    "a gibibyte": ("head -c 1073741824 /dev/zero", 1 << 30),
    "one line of fifty megabytes": ("head -c 50000000 /dev/zero | tr '\\0' x", 50_000_000),
    "both streams": ("head -c 100000000 /dev/zero & head -c 100000000 /dev/zero >&2; wait", 200_000_000),
    "many tiny writes": ("for i in {1..30000}; do printf x; done", 30_000),
}


def resident_bytes(session: HostileSession) -> int:
    """Return the memory of PID 1, in bytes."""
    return int(session.watched.status_of()["VmRSS"].split()[0]) * 1024


@pytest.mark.parametrize(("flood", "total"), FLOODS.values(), ids=FLOODS.keys())
def test_unlimited_output_uses_constant_memory_in_guest_and_sandboxd(
    sandboxd: OwnSandboxd, flood: str, total: int
) -> None:
    """Aim: make a process keep the whole output in memory."""
    with sandboxd.session(session="flood") as session:
        session.bash("true")
        before, guest_before = reset_peak(sandboxd), resident_bytes(session)
        answer = session.bash(flood, timeout_s=20.0)

        assert answer.done["streams"]["merged"]["total"] == total
        assert sum(map(len, answer.streams.values())) <= sum(CAPTURE.values())
        assert sandboxd.peak_bytes() - before < FLAT_BYTES
        assert resident_bytes(session) - guest_before < 2 * MIB
        assert session.is_usable()


def reset_peak(sandboxd: OwnSandboxd) -> int:
    sandboxd.reset_peak()
    return sandboxd.peak_bytes()


def test_unread_output_uses_constant_memory_and_delays_no_other_session(sandboxd: OwnSandboxd) -> None:
    """Aim: fill the memory with a stream to a slow worker, or delay other sessions."""
    first, may_read = threading.Event(), threading.Event()

    def take(_stream: str, _data: bytes) -> None:
        first.set()
        may_read.wait(20)

    with (
        sandboxd.session(session="unread") as session,
        sandboxd.session(session="other") as other,
        SandboxClient(sandboxd.path) as worker,
    ):
        request = {
            "op": "exec",
            "argv": ["yes"],
            "cwd": "/workspace",
            "env": {},
            "timeout_s": 1.0,
            "capture": {"stream": 1 << 34},
        }
        before = reset_peak(sandboxd)
        reading = threading.Thread(target=lambda: worker.call(session.name, request, on_data=take), daemon=True)
        reading.start()
        try:
            assert first.wait(20)
            assert all(other.bash("true").done["exit_code"] == 0 for _ in range(30))
            grown = sandboxd.peak_bytes() - before
        finally:
            may_read.set()
        reading.join(20)

        assert grown < FLAT_BYTES
        assert not reading.is_alive()


def test_live_output_events_are_limited_in_rate(sandboxd: OwnSandboxd) -> None:
    """Aim: cause an event for each byte. Live output is sent at most every 50 ms."""
    pieces: list[int] = []
    with sandboxd.session(session="drip") as session, SandboxClient(sandboxd.path) as worker:
        script = b"for i in {1..150}; do printf x; read -t 0.003 <> <(:); done; true"
        request = {
            "op": "exec",
            "argv": None,
            "script_bytes": len(script),
            "cwd": None,
            "state": "use",
            "timeout_s": 20.0,
        }
        more = {"capture": CAPTURE, "live": True, "max_bytes": 100_000}
        done = worker.call(
            session.name, {**request, **more}, script, on_data=lambda stream, _: pieces.append(stream == "live")
        ).done

        assert 1 <= sum(pieces) <= done["run_s"] / 0.05 + 2


def test_failing_calls_do_not_fill_the_sandboxd_log(sandboxd: OwnSandboxd) -> None:
    """Aim: write a log line for each refused or failed call, or write the call's text into a log line."""
    with sandboxd.session(session="log") as session:
        before = len(sandboxd.log())
        for _ in range(20):
            session.bash("head -c 5000 /dev/zero | tr '\\0' x; echo '{\"event\": \"forged\"}' >&2; exit 1")

        assert len(sandboxd.log()) - before < 5000
