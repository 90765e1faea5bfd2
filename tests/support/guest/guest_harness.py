"""The guest as PID 1 of a real pid namespace, without Docker. Tests start the guest, exchange frames with it, and
inspect it from outside.
"""

import compileall
import contextlib
import ctypes
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from tests.support.stack.waiting import wait_until
from toolcrew.workers.sandboxd.frames import MAX_DOWN, MAX_UP, Frame, FrameDecoder, encode_frame

GUEST_PARENT = Path(__file__).resolve().parents[3] / "sandbox-images"
if str(GUEST_PARENT) not in sys.path:
    sys.path.append(str(GUEST_PARENT))

PYTHON = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable
RIPGREP = os.environ.get("TOOLCREW_TEST_RIPGREP", "/usr/bin/rg").encode()
"""The ripgrep of the tests. In a sandbox the guest has its own."""
HAS_RIPGREP_14 = b"ripgrep 13" not in subprocess.run([RIPGREP, "--version"], capture_output=True, check=False).stdout
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]);"
    "from guest import supervisors; from guest.loop import main, parse_options; from guest.paths import GuestPaths;"
    "supervisors.IDLE_S = float(sys.argv[2]);"
    "exec(sys.argv[3]);"
    "paths = [path.encode() for path in sys.argv[4:7]];"
    f"main(parse_options(sys.argv[7:]), GuestPaths(tuple(paths[:-1]), paths[-1], ripgrep={RIPGREP!r}))"
)
# Each guest has its own user, because the kernel counts processes by user over the whole host.
_FIRST_UID = 200_000
DEADLINE_S = 90.0
# The pause between two inspections from outside. Polling without a pause takes the guest's processor time.
_CHECK_INTERVAL_S = 0.002


def _unshare_refused() -> str | None:
    if os.geteuid() != 0:
        return "needs root, for a pid namespace"
    try:
        probe = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, timeout=20)
    except OSError as error:
        return f"unshare cannot be run: {error}"
    return None if probe.returncode == 0 else f"no pid namespace: {probe.stderr.decode().strip()}"


_refused = _unshare_refused()
if _refused is not None and os.environ.get("TOOLCREW_TEST_REQUIRE"):
    raise RuntimeError(f"a real guest cannot be started, and TOOLCREW_TEST_REQUIRE is set: {_refused}")
needs_namespace = pytest.mark.skipif(_refused is not None, reason=_refused or "")


class Done:
    """The end of one request: its done or pong header, and the bytes of each stream in order of arrival."""

    def __init__(self, header: Mapping[str, Any], streams: Mapping[str, bytes]) -> None:
        self.header = header
        self._streams = streams

    def __getitem__(self, name: str) -> Any:
        return self.header[name]

    def __contains__(self, name: str) -> bool:
        return name in self.header

    @property
    def streams(self) -> tuple[str, ...]:
        """Return the streams that delivered at least one byte."""
        return tuple(self._streams)

    def bytes_of(self, stream: str) -> bytes:
        return self._streams.get(stream, b"")

    @property
    def code(self) -> str | None:
        """Return the code of an error, or None."""
        error = self.header.get("error")
        return str(error["code"]) if error else None


class Guest:
    """A running guest. The guest runs as an unprivileged user. Its roots are `workspace` and `tmp`; `output` holds
    output that is too long.
    """

    def __init__(
        self,
        base: Path,
        shell_prefix: str,
        idle_s: float,
        options: Sequence[str] = (),
        faults: str = "",
        has_streams: bool = False,
    ) -> None:
        uid = _FIRST_UID + secrets.randbelow(1 << 20)
        self.workspace = base / "workspace"
        self.tmp = base / "tmp"
        self.output = base / "output"
        for root in (self.workspace, self.tmp, self.output):
            root.mkdir()
            os.chown(root, uid, uid)
        roots = [str(root) for root in (self.workspace, self.tmp, self.output)]
        guest = [PYTHON, "-I", "-S", "-u", "-c", _BOOT, str(GUEST_PARENT), str(idle_s), faults, *roots, *options]
        user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs", "--inh-caps=-all"]
        # dash has no `ulimit -u`, so sh is not used. A limit that cannot be set must stop the start instead of being
        # ignored.
        self.streams, guests_streams = socket.socketpair()
        """The channel of streams, if the guest has one."""
        passed = (guests_streams.fileno(),) if has_streams else ()
        moves = "".join(f"exec 3<&{fd}; [ {fd} = 3 ] || exec {fd}<&-;" for fd in passed)
        shell = ["/bin/bash", "--norc", "-c", f'set -e; {shell_prefix} {moves} exec "$@"', "bash"]
        self._process = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *shell, *user, *guest],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=passed,
        )
        guests_streams.close()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        self._decoder = FrameDecoder(MAX_UP)
        self._waiting: list[Frame] = []
        self._parts: dict[str, dict[str, bytearray]] = {}
        self._ended: dict[str, Done] = {}
        self.events: list[Frame] = []
        """Frames of connections that arrived before the end of a request. The test removes them."""
        hello = self.next_frame()
        assert hello.header == {"ev": "hello", "v": 1}

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Return the guest's stdin and stdout, for a test that uses its own protocol."""
        return self._stdin, self._stdout

    def connect(self, port: int) -> socket.socket:
        """Return a connection to the guest's loopback, as a program inside the guest would open. Raises OSError."""
        made: list[socket.socket | OSError] = []

        def connect() -> None:
            network = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)
            assert ctypes.CDLL(None).setns(network, 0) == 0
            os.close(network)
            try:
                made.append(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S))
            except OSError as error:
                made.append(error)

        # A socket stays in the network namespace of the thread that created the socket.
        thread = threading.Thread(target=connect)
        thread.start()
        thread.join()
        if isinstance(made[0], OSError):
            raise made[0]
        return made[0]

    @property
    def pid(self) -> int:
        """Return the pid of PID 1 as seen from outside."""
        # The direct child is `unshare`; its only child is PID 1 of the new namespace.
        outer = self._process.pid
        return int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])

    def send(self, header: Mapping[str, object], body: bytes = b"") -> None:
        self.send_raw(encode_frame(header, body, max_total=MAX_DOWN))

    def send_raw(self, data: bytes) -> None:
        self._stdin.write(data)
        self._stdin.flush()

    def close_stdin(self) -> None:
        self._stdin.close()

    def wait_exit(self) -> int:
        return self._process.wait(DEADLINE_S)

    def next_frame(self) -> Frame:
        """Return the next frame. Fails the test if no frame arrives or the guest has exited."""
        poller = select.poll()
        poller.register(self._stdout, select.POLLIN)
        while not self._waiting:
            assert poller.poll(DEADLINE_S * 1000), "the guest does not answer"
            data = os.read(self._stdout.fileno(), 1 << 18)
            assert data, "the guest has gone"
            # One read may contain several frames or a part of a frame.
            self._waiting += self._decoder.feed(data)
        return self._waiting.pop(0)

    def start(self, op: str, body: bytes = b"", **fields: object) -> str:
        """Send a request and its body. `finish` receives the response."""
        request_id = secrets.token_hex(16)
        self.send({"id": request_id, "op": op, "body_bytes": len(body), **fields}, body[: MAX_DOWN // 2])
        for at in range(MAX_DOWN // 2, len(body), MAX_DOWN // 2):
            self.send({"id": request_id, "op": "data"}, body[at : at + MAX_DOWN // 2])
        return request_id

    def finish(self, request_id: str) -> Done:
        """Return the end of a request. Frames of other requests are kept for their own `finish`."""
        while request_id not in self._ended:
            frame = self.next_frame()
            if "id" not in frame.header:
                self.events.append(frame)
                continue
            frame_id = frame.header["id"]
            parts = self._parts.setdefault(frame_id, {})
            if frame.header["ev"] == "data":
                parts.setdefault(frame.header["stream"], bytearray()).extend(frame.body)
            else:
                assert frame_id not in self._ended, "two ends of one request"
                self._ended[frame_id] = Done(frame.header, {name: bytes(data) for name, data in parts.items()})
        return self._ended[request_id]

    def request(self, op: str, body: bytes = b"", **fields: object) -> Done:
        return self.finish(self.start(op, body, **fields))

    def start_script(self, script: str | bytes, stdin: bytes = b"", **fields: object) -> str:
        raw = script.encode() if isinstance(script, str) else script
        defaults: dict[str, object] = {
            "argv": None,
            "script_bytes": len(raw),
            "cwd": ".",
            "env": {},
            "timeout_s": 60,
            "capture": {"stdout": 1 << 20, "stderr": 1 << 16, "merged": 0},
        }
        return self.start("exec", raw + stdin, **{**defaults, **fields})

    def run(self, script: str | bytes, stdin: bytes = b"", **fields: object) -> Done:
        return self.finish(self.start_script(script, stdin, **fields))

    def wait_for_file(self, name: str) -> str:
        """Return the content of a workspace file after a program has written a whole line."""

        def read_lines() -> str:
            with contextlib.suppress(FileNotFoundError):
                text = (self.workspace / name).read_text()
                return text if text.endswith("\n") else ""
            return ""

        return str(wait_until(read_lines, DEADLINE_S, f"{name} was written", pause_s=_CHECK_INTERVAL_S))

    def resident_bytes(self) -> int:
        """Return the memory of PID 1 in bytes, including file pages."""
        return int(Path(f"/proc/{self.pid}/status").read_text().split("VmRSS:")[1].split()[0]) * 1024

    def processor_s(self) -> float:
        """Return the processor time of PID 1 and of its ended children, in seconds. A busy machine does not change it."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def others(self) -> dict[int, str]:
        """Return the state letter of every process of the namespace except PID 1, keyed by outside pid. Zombies are
        included.
        """
        one = self.pid
        namespace = os.readlink(f"/proc/{one}/ns/pid")
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != one:
                with contextlib.suppress(OSError):
                    if os.readlink(entry / "ns" / "pid") == namespace:
                        found[int(entry.name)] = _state(entry)
        return found

    def wait_alone(self) -> bool:
        """Return whether PID 1 becomes the only process. A supervisor that waits for a call ends after its idle time."""
        give_up_at = time.monotonic() + DEADLINE_S
        while self.others():
            if time.monotonic() > give_up_at:
                return False
            time.sleep(_CHECK_INTERVAL_S)
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(DEADLINE_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._stdout.close()


def _state(entry: Path) -> str:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0]


@contextlib.contextmanager
def running_guest(
    shell_prefix: str = "",
    idle_s: float = 1.0,
    options: Sequence[str] = (),
    faults: str = "",
    has_streams: bool = False,
) -> Iterator[Guest]:
    """Run a guest with fresh roots. `shell_prefix` runs before the guest as root, to set limits: `ulimit -u 60;`.

    `idle_s`: how long a supervisor waits for its next call; tests of leftovers use a small value. `options`: options
    of the entry point, such as `--life 3`. `faults`: Python code that runs before the guest's loop and makes system
    calls fail. `has_streams`: the guest has a channel of streams.
    """
    # Other users may not enter the directory of pytest.
    base = Path(tempfile.mkdtemp(prefix="toolcrew-guest-"))
    base.chmod(0o755)
    # The guest's user cannot write compiled files. A guest in an image also starts with compiled files.
    compileall.compile_dir(GUEST_PARENT / "guest", quiet=1)
    try:
        guest = Guest(base, shell_prefix, idle_s, options, faults, has_streams)
        try:
            yield guest
        finally:
            guest.close()
    finally:
        shutil.rmtree(base)
