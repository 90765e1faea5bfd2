"""Processes of streams, with real programs: output, terminals, input, signals, ends, and what survives a new epoch."""

import base64
import contextlib
import hashlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.guest.guest_harness import DEADLINE_S
from tests.support.guest.stream_client import ClientStream, RunningServer, StreamError, running_stream_server
from tests.support.stack.waiting import wait_until
from toolcrew.contract.stream_protocol import FrameKind, StreamFrame

FROM_LIVE: dict[str, Any] = {"from": "live"}
_RING_BYTES = 1_048_576
_CLEAN_END = {"exit_code": 0, "signal": None, "oom": False, "timed_out": False, "lost_bytes": 0}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_stream_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def server(shared: RunningServer) -> Iterator[RunningServer]:
    """The shared server in a new epoch. Its processes are killed after the test."""
    shared.restart_client().begin_epoch()
    yield shared
    client = shared.restart_client()
    client.begin_epoch()
    for process in client.call("processes")["processes"]:
        if process["end"] is None:
            with contextlib.suppress(StreamError):
                client.call("signal", process=process["process"], signal=9, tree=True)


def eventually(check: Callable[[], bool]) -> None:
    wait_until(check, DEADLINE_S, "the state does not come")


def run(server: RunningServer, script: str, **fields: Any) -> ClientStream:
    return server.client.open("process", argv=["bash", "-c", script], **fields)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def code_of(stream: ClientStream) -> str:
    with pytest.raises(StreamError) as failure:
        stream.opened()
    return str(failure.value.code)


def test_both_outputs_have_one_position_and_keep_their_kind(server: RunningServer) -> None:
    stream = run(server, "echo one; sleep 0.05; echo two >&2; sleep 0.05; echo three; exit 3")
    assert stream.opened()["from"] == 0
    assert stream.end() == {**_CLEAN_END, "exit_code": 3}
    assert stream.pieces == [(b"one\n", 0), (b"two\n", 1), (b"three\n", 0)]


def test_output_above_all_windows_arrives_once(server: RunningServer) -> None:
    stream = run(server, "seq 300000; seq 300000 >&2")
    assert stream.end() == _CLEAN_END
    expected = b"".join(b"%d\n" % number for number in range(1, 300_001))
    assert stream.data_of(0) == expected
    assert stream.data_of(1) == expected


def test_a_process_has_the_environment_of_the_session_and_its_own(server: RunningServer) -> None:
    stream = server.client.open("process", argv=["env"], env={"OWN": "a b", "PAGER": "less"})
    stream.end()
    variables = dict(line.split("=", 1) for line in stream.data.decode().splitlines())
    assert variables["OWN"] == "a b"
    assert variables["PAGER"] == "less"
    assert variables["GIT_TERMINAL_PROMPT"] == "0"


def test_a_process_starts_in_its_folder_with_no_foreign_descriptors_and_default_signals(server: RunningServer) -> None:
    (server.workspace / "sub").mkdir(exist_ok=True)
    stream = run(server, "pwd; ls /proc/self/fd; grep -E 'Sig(Ign|Blk)' /proc/self/status; umask", cwd="sub")
    stream.end()
    lines = stream.data.decode().split()
    assert lines[0] == str(server.workspace / "sub")
    assert lines[1:5] == ["0", "1", "2", "3"]  # 3 is the folder that ls reads
    assert lines[5:] == ["SigBlk:", "0" * 16, "SigIgn:", "0" * 16, "0022"]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"argv": ["no-such-program"]}, "SPAWN_FAILED"),
        ({"argv": ["/etc/passwd"]}, "SPAWN_FAILED"),
        ({"argv": []}, "INVALID_ARGUMENTS"),
        ({"argv": ["a\0b"]}, "INVALID_ARGUMENTS"),
        ({"argv": ["true"], "cwd": "/no-such"}, "FILE_NOT_FOUND"),
        ({"argv": ["true"], "user": "no-such-user"}, "INVALID_ARGUMENTS"),
        ({"argv": ["true"], "pty": {"cols": 0, "rows": 1}}, "INVALID_ARGUMENTS"),
        ({"argv": ["true"], "env": {"A=": "b"}}, "INVALID_ARGUMENTS"),
        ({"argv": ["true"], "timeout_s": 0}, "INVALID_ARGUMENTS"),
        ({"argv": ["true"], "unknown": 1}, "INVALID_ARGUMENTS"),
        ({"argv": ["true"], "tag": "t" * 129}, "INVALID_ARGUMENTS"),
    ],
)
def test_a_start_that_cannot_work_is_refused(server: RunningServer, fields: dict[str, Any], code: str) -> None:
    before = len(server.client.call("processes")["processes"])
    assert code_of(server.client.open("process", **fields)) == code
    assert len(server.client.call("processes")["processes"]) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_runs_as_another_user(server: RunningServer) -> None:
    script = "id -un; id -gn; echo $HOME $USER; tty | head -c 8"
    stream = run(server, script, user="nobody", cwd="/", pty={"cols": 80, "rows": 24})
    assert stream.end()["exit_code"] == 0
    assert stream.data.decode().split()[:5] == ["nobody", "nogroup", "/nonexistent", "nobody", "/dev/pts"]


def test_a_terminal_has_a_size_echo_signals_and_an_end(server: RunningServer) -> None:
    stream = server.client.open("process", argv=["bash", "--norc"], pty={"cols": 91, "rows": 33}, env={"PS1": "$ "})
    process = stream.opened()["process"]
    stream.write(b"stty size; tty\n")
    stream.read_until(b"33 91")
    server.client.call("resize", process=process, cols=100, rows=40)
    stream.write(b"stty size\n")
    stream.read_until(b"40 100")
    stream.write(b"bash -c 'echo is run''ning; exec sleep 1000'\n")
    stream.read_until(b"is running")
    stream.write(b"\x03")
    stream.read_until(b"^C")
    stream.write(b"echo interrupted $?\n")
    stream.read_until(b"interrupted 130")
    stream.write(b"\x04")
    assert stream.end() == _CLEAN_END


def test_the_end_of_a_terminal_ends_what_it_left_in_the_background(server: RunningServer) -> None:
    child = "(trap 'echo hup > hup; exit' HUP; echo > ready; while :; do sleep 0.01; done) & echo $!"
    stream = run(server, f"{child}; until [ -e ready ]; do sleep 0.01; done", pty={"cols": 8, "rows": 8})
    assert stream.end()["exit_code"] == 0
    eventually(lambda: (server.workspace / "hup").exists())
    eventually(lambda: not is_alive(int(stream.data.split()[0])))


def test_input_reaches_the_process_until_its_end(server: RunningServer) -> None:
    data = bytes(range(256)) * 4000
    stream = run(server, "sha256sum; exec head -c 10", stdin=True)
    for at in range(0, len(data), 50_000):
        stream.write(data[at : at + 50_000], is_last=at + 50_000 >= len(data))
    stream.end()
    assert stream.data.split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_a_process_without_input_reads_its_end(server: RunningServer) -> None:
    stream = run(server, "wc -c")
    process = stream.opened()["process"]
    assert stream.end()["exit_code"] == 0
    assert stream.data == b"0\n"
    with pytest.raises(StreamError):
        server.client.call("close_stdin", process=process)


def test_input_of_requests_arrives_once(server: RunningServer) -> None:
    client = server.client
    process = run(server, "cat", stdin=True).opened()["process"]

    def send(data: bytes, offset: int) -> int:
        text = base64.b64encode(data).decode()
        return int(client.call("input", process=process, data=text, writer="w", offset=offset)["input_offset"])

    assert send(b"abc", 0) == 3
    assert send(b"abcdef", 0) == 6
    assert send(b"cd", 2) == 6
    with pytest.raises(StreamError):
        send(b"x", 7)
    client.call("close_stdin", process=process)
    stream = client.open("attach", process=process)
    assert stream.end() == _CLEAN_END
    assert stream.data == b"abcdef"


def test_input_that_is_not_read_is_bounded(server: RunningServer) -> None:
    client = server.client
    process = run(server, "sleep 1000", stdin=True).opened()["process"]
    text = base64.b64encode(bytes(32_768)).decode()
    before = server.memory_bytes
    for _ in range(32):
        client.call("input", process=process, data=text)
    for number in (client.ask("input", process=process, data=text) for _ in range(3)):
        last = number
    with pytest.raises(StreamError, match="try again later"):
        client.finish(last)
    streams = [client.open("attach", process=process) for _ in range(5)]
    for stream in streams:
        stream.opened()
    client.call("processes")
    client.receive(0.05)
    assert [stream.send_limit for stream in streams] == [0] * 5
    assert server.memory_bytes - before < 4 << 20


def test_a_process_has_at_most_64_named_writers(server: RunningServer) -> None:
    client = server.client
    process = run(server, "sleep 1000", stdin=True).opened()["process"]
    for number in range(64):
        client.call("input", process=process, data="", writer=f"w{number}", offset=0)
    with pytest.raises(StreamError):
        client.call("input", process=process, data="", writer="another", offset=0)
    client.call("input", process=process, data="", writer="w7", offset=0)
    assert client.open("attach", process=process).opened()["input_offset"] == 0


def test_a_signal_ends_a_process_and_kill_answers_after_its_end(server: RunningServer) -> None:
    client = server.client
    for number in (signal.SIGTERM, signal.SIGKILL):
        stream = run(server, "exec sleep 1000")
        opened = stream.opened()
        client.call("signal", process=opened["process"], signal=int(number))
        if number == signal.SIGKILL:
            assert not Path(f"/proc/{opened['pid']}").exists()
        assert stream.end()["signal"] == number
        with pytest.raises(StreamError):
            client.call("signal", process=opened["process"], signal=15)


def test_a_tree_is_killed_with_what_its_shells_left(server: RunningServer) -> None:
    stream = run(
        server, "sleep 1000 & echo $!; (sleep 1000 & echo $!); setsid sleep 1000 & sleep 0.05; echo $!; exec sleep 1000"
    )
    process = stream.opened()["process"]
    while stream.data.count(b"\n") < 3:
        stream.step()
    pids = [int(pid) for pid in stream.data.split()]
    assert all(map(is_alive, pids))
    server.client.call("signal", process=process, signal=9, tree=True)
    eventually(lambda: not any(map(is_alive, pids)))
    assert stream.end()["signal"] == 9


def test_a_time_limit_kills_the_tree(server: RunningServer) -> None:
    stream = run(
        server, "trap '' TERM; bash -c 'trap \"\" TERM; echo $$; sleep 1000; sleep 1000' & wait; wait", timeout_s=0.2
    )
    end = stream.end()
    assert (end["timed_out"], end["signal"]) == (True, 9)
    eventually(lambda: not is_alive(int(stream.data)))


def test_a_survivor_does_not_delay_the_end_and_gets_no_sigpipe(server: RunningServer) -> None:
    started = time.monotonic()
    stream = run(server, "(sleep 0.6; echo late; echo alive > alive) & disown; echo done")
    assert stream.end() == _CLEAN_END
    assert stream.data == b"done\n"
    assert time.monotonic() - started < 0.58
    eventually(lambda: (server.workspace / "alive").exists())


def test_wait_answers_at_the_end_or_after_its_time(server: RunningServer) -> None:
    client = server.client
    process = run(server, "read; exit 4", stdin=True).opened()["process"]
    assert client.call("wait", process=process, timeout_s=0) == {"running": True}
    assert client.call("wait", process=process, timeout_s=0.05) == {"running": True}
    late = client.ask("wait", process=process, timeout_s=60)
    client.call("close_stdin", process=process)
    assert client.finish(late) == {**_CLEAN_END, "exit_code": 4}
    assert client.call("wait", process=process, timeout_s=0)["exit_code"] == 4


def test_a_list_has_what_was_asked_for(server: RunningServer) -> None:
    stream = server.client.open(
        "process", argv=["sleep", "1000"], tag="t1", pty={"cols": 5, "rows": 6}, cwd="/tmp", user=None
    )
    opened = stream.opened()
    (entry,) = [entry for entry in server.client.call("processes")["processes"] if entry["tag"] == "t1"]
    assert abs(entry.pop("started_at") - time.time()) < 30
    assert entry == {
        "process": opened["process"],
        "pid": opened["pid"],
        "argv": ["sleep", "1000"],
        "cwd": "/tmp",
        "tag": "t1",
        "pty": {"cols": 5, "rows": 6},
        "user": None,
        "output_bytes": 0,
        "end": None,
    }


def test_long_lists_fit_into_a_frame(server: RunningServer) -> None:
    for _ in range(30):
        server.client.open("process", argv=["true", "\x01ä" * 2_000]).end()
    entries = server.client.call("processes")["processes"]
    assert 0 < len(entries) < 30
    assert entries == sorted(entries, key=lambda entry: entry["process"])


def test_the_33rd_running_process_is_refused(server: RunningServer) -> None:
    streams = [server.client.open("process", argv=["sleep", "1000"], window=0) for _ in range(33)]
    assert code_of(streams[-1]) == "INVALID_ARGUMENTS"
    assert all(stream.opened() for stream in streams[:32])


def test_several_readers_get_the_same_output_from_their_positions(server: RunningServer) -> None:
    client = server.client
    first = run(server, "seq 2000; read; seq 2000 >&2", stdin=True, tag="several")
    process = first.opened()["process"]
    whole = b"".join(b"%d\n" % number for number in range(1, 2001))
    first.read_bytes(len(whole))
    start = client.open("attach", process=process)
    middle = client.open("attach", tag="several", **{"from": 1000})
    live = client.open("attach", process=process, **FROM_LIVE)
    assert [stream.opened()["from"] for stream in (start, middle, live)] == [0, 1000, len(whole)]
    first.write(b"\n")
    for stream, begin in ((first, 0), (start, 0), (middle, 1000), (live, len(whole))):
        assert stream.end() == _CLEAN_END
        assert stream.data == (whole + whole)[begin:]
        assert stream.data_of(1) == whole
    again = client.open("attach", process=process, **{"from": 2 * len(whole) - 5})
    assert again.end() == _CLEAN_END
    assert again.data == b"2000\n"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"process": 5}, "FILE_NOT_FOUND"),
        ({"tag": "none"}, "FILE_NOT_FOUND"),
        ({}, "INVALID_ARGUMENTS"),
        ({"process": True}, "INVALID_ARGUMENTS"),
    ],
)
def test_no_such_process(server: RunningServer, fields: dict[str, Any], code: str) -> None:
    assert code_of(server.client.open("attach", **fields)) == code


def test_a_position_after_the_end_is_refused(server: RunningServer) -> None:
    process = run(server, "exec sleep 1000").opened()["process"]
    assert code_of(server.client.open("attach", process=process, **{"from": 1})) == "OFFSET_OUT_OF_RANGE"


def test_output_without_a_reader_keeps_the_last_mebibyte_and_counts_the_rest(server: RunningServer) -> None:
    client = server.client
    stream = run(server, "head -c 30000000 /dev/zero | tr '\\0' x; echo end", window=0, pace=False)
    process = stream.opened()["process"]
    before = server.memory_bytes
    assert client.call("wait", process=process, timeout_s=60) == _CLEAN_END
    attached = client.open("attach", process=process)
    opened = attached.opened()
    assert attached.end() == {**_CLEAN_END, "lost_bytes": opened["lost_bytes"]}
    assert opened["from"] + len(attached.data) == 30_000_004
    assert len(attached.data) >= _RING_BYTES
    assert attached.data.endswith(b"xend\n")
    stream.grant(65_536)
    lost = stream.end()["lost_bytes"]
    assert lost + len(stream.data) == 30_000_004
    assert server.memory_bytes - before < 6 << 20


def test_output_that_changes_after_each_byte_is_bounded(server: RunningServer) -> None:
    script = "import os\nfor _ in range(150000): os.write(1, b'o'); os.write(2, b'e')"
    stream = server.client.open("process", argv=["python3", "-c", script], window=0, pace=False)
    before = server.memory_bytes
    end = server.client.call("wait", process=stream.opened()["process"], timeout_s=120)
    assert end == _CLEAN_END
    assert server.memory_bytes - before < 6 << 20
    stream.grant(65_536)
    lost = stream.end()["lost_bytes"]
    assert lost + len(stream.data_of(0)) + len(stream.data_of(1)) == 300_000


def test_all_rings_together_are_bounded(server: RunningServer) -> None:
    client = server.client
    before = server.memory_bytes
    script = "head -c 1500000 /dev/zero; exec sleep 1000"
    processes = [run(server, script, window=0, pace=False).opened()["process"] for _ in range(20)]
    eventually(
        lambda: all(
            entry["output_bytes"] == 1_500_000
            for entry in client.call("processes")["processes"]
            if entry["process"] in processes
        )
    )
    kept = []
    for process in processes:
        stream = client.open("attach", process=process, window=0)
        kept.append(1_500_000 - stream.opened()["from"])
    assert sum(kept) <= 8 << 20
    assert min(kept) > 100_000
    assert server.memory_bytes - before < 24 << 20


def test_a_process_waits_for_a_reader_with_pace(server: RunningServer) -> None:
    client = server.client
    stream = run(server, "yes | head -c 3000000; echo over > over")
    process = stream.opened()["process"]
    assert client.call("wait", process=process, timeout_s=0.3) == {"running": True}
    assert not (server.workspace / "over").exists()
    assert stream.end() == _CLEAN_END
    assert stream.received == 3_000_000


def test_a_process_goes_on_when_its_reader_with_pace_leaves(server: RunningServer) -> None:
    client = server.client
    stream = run(server, "yes | head -c 3000000")
    process = stream.opened()["process"]
    assert client.call("wait", process=process, timeout_s=0.1) == {"running": True}
    stream.close()
    assert client.call("wait", process=process, timeout_s=60) == _CLEAN_END


def test_every_byte_arrives_once_in_both_directions_over_new_epochs(server: RunningServer) -> None:
    """A program that echoes its input survives 200 clients, of which each leaves within a frame."""
    rng = random.Random(11)
    sent = bytes(rng.randrange(256) for _ in range(200_000))
    opened = run(server, "exec cat", stdin=True, writer="w").opened()
    process, received = opened["process"], b""
    for _ in range(200):
        client = server.restart_client()
        client.begin_epoch()
        stream = client.open("attach", process=process, writer="w", pace=True, **{"from": len(received)})
        fields = stream.opened()
        assert (fields["from"], fields["lost_bytes"]) == (len(received), 0)
        position = fields["input_offset"]
        stream.write(sent[position : position + rng.randrange(2000)])
        while client.receive(0.001) and rng.random() < 0.9:
            pass
        # The client dies within a frame that it sends. Of those that arrived, it has read some.
        part = sent[position + stream.sent : position + stream.sent + 300]
        client.send_raw(_encode_data(stream, part)[: rng.randrange(320)])
        while any(frame.stream == stream.number for frame in client.frames) and rng.random() < 0.95:
            stream.step()
        received += stream.data
    client = server.restart_client()
    client.begin_epoch()
    stream = client.open("attach", process=process, writer="w", **{"from": len(received)})
    position = stream.opened()["input_offset"]
    while position + stream.sent < len(sent):
        at = position + stream.sent
        stream.write(sent[at : at + 10_000])
        stream.read_bytes(at + 10_000 - len(received) if at + 10_000 < len(sent) else len(sent) - len(received))
    stream.write(b"", is_last=True)
    assert stream.end() == _CLEAN_END
    assert received + stream.data == sent


def _encode_data(stream: ClientStream, data: bytes) -> bytes:
    return StreamFrame(FrameKind.DATA, stream.number, stream.sent, data).encode()


def test_the_server_ends_its_processes_with_its_channel(tmp_path: Path) -> None:
    with running_stream_server(tmp_path) as server:
        stream = run(server, "setsid sleep 1000 & echo $!; trap '' HUP TERM; sleep 1000")
        stream.read_until(b"\n")
        pids = [int(stream.data), stream.opened()["pid"]]
        assert all(map(is_alive, pids))
    eventually(lambda: not any(map(is_alive, pids)))


def test_programs_of_the_sandbox_cannot_read_the_server(server: RunningServer) -> None:
    text = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
    assert text.strip(b"\0") == b"streams"
    stream = run(server, "echo; exec setpriv --reuid=65534 --clear-groups ls /proc/$PPID/fd")
    assert stream.end()["exit_code"] == 2
