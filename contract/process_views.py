"""Processes of a session, as the HTTP API accepts and returns them."""

from typing import Annotated, Final

from pydantic import Field

from toolcrew.contract.calls import LONGEST_TIMEOUT_S, Record
from toolcrew.contract.clock import Instant
from toolcrew.contract.session_views import Base64
from toolcrew.contract.stream_protocol import MAX_DATA_BYTES

MAX_PATH_BYTES: Final = 4096
MAX_POSITION: Final = 2**53 - 1
"""Largest position of a stream: JavaScript's numbers are exact up to here."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]
Position = Annotated[int, Field(ge=0, le=MAX_POSITION)]


class TerminalSize(Record):
    """Size of a terminal, in characters."""

    cols: int = Field(ge=1, le=4096)
    rows: int = Field(ge=1, le=4096)


class NewProcess(Record):
    """A process to start, without a shell. It goes on when no client is connected.

    `argv`: the program and its arguments. `env`: variables in addition to those of the session. `cwd` null: /workspace.
    `user` null: the user of the sandbox. `pty`: run in a terminal of this size. `stdin`: the process has an input; a
    terminal always has one. `tag`: a name of your choice. `timeout_s`: the process is killed after so many seconds.
    `pace`: the process waits for its first reader, for at most 10 s, once it has written 128 KiB.
    """

    argv: tuple[str, ...] = Field(min_length=1, max_length=4096)
    env: dict[str, str] = Field(default_factory=dict, max_length=1024)
    cwd: str | None = Field(default=None, max_length=MAX_PATH_BYTES)
    user: str | None = Field(default=None, max_length=64)
    pty: TerminalSize | None = None
    stdin: bool = False
    tag: Name | None = None
    timeout_s: float | None = Field(default=None, gt=0, le=LONGEST_TIMEOUT_S)
    pace: bool = False


class ProcessEnd(Record):
    """The end of a process. One of `exit_code` and `signal` is null. `oom`: the sandbox had no memory left.
    `timed_out`: the process was killed at its `timeout_s`. `lost_bytes`: output that the reader did not get.
    """

    exit_code: int | None = None
    signal: int | None = None
    oom: bool = False
    timed_out: bool = False
    lost_bytes: int = 0


class StartedProcess(Record):
    """A process that runs. `process`: its number in the session. `pid`: its number in the sandbox."""

    process: int
    pid: int


class ProcessView(StartedProcess):
    """A process. `output_bytes`: the position of the end of its output. `end` null: the process runs."""

    argv: tuple[str, ...]
    cwd: str
    tag: str | None
    pty: TerminalSize | None
    user: str | None
    started_at: Instant
    output_bytes: int
    end: ProcessEnd | None = None


class ProcessState(Record):
    """The answer to a wait. `end` null: the process still runs."""

    running: bool
    end: ProcessEnd | None = None


class NewSignal(Record):
    """A signal. `tree`: send it to the whole process group too."""

    signal: int = Field(ge=1, le=64)
    tree: bool = False


class NewInput(Record):
    """Input of a process, in base64. `writer`: the name of the client. `offset`: the position of the first byte in the
    writer's input. Bytes that the process already has are not written again.
    """

    data: Base64 = Field(max_length=MAX_DATA_BYTES)
    writer: Name
    offset: Position = 0


class InputState(Record):
    """The next position of a writer's input."""

    input_offset: int
