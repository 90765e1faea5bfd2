"""A standalone program that Python runs inside a sandbox for each call of a kept MCP server. It sends the job on
standard input to the keeper (sandbox_driver.py) and copies the keeper's answer to standard output.

Arguments: the name of the keeper's abstract socket, the mark of the job, and the seconds to wait for the keeper. If
no keeper listens, the program writes this failure in the format of a keeper. The program imports only built-in and C
modules, because importing json or socket would double the duration of a call.
"""

from __future__ import annotations

import _socket
import posix
import sys
import time

PIECE = 65536
PACE_S = 0.005


def reach(name: str, until: float) -> _socket.socket | None:
    """Return a connection to a keeper that is ready; None if there is no keeper. No request is sent before, so a
    retry repeats nothing.
    """
    while True:
        line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            line.connect("\0" + name)
            if line.recv(1) == b"+":
                return line
        except OSError:
            # No keeper listens on this name, or the keeper has just ended.
            pass
        line.close()
        if time.monotonic() >= until:
            return None
        time.sleep(PACE_S)


def read_all() -> bytes:
    pieces: list[bytes] = []
    while True:
        piece = posix.read(0, PIECE)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)


def write(data: bytes) -> None:
    while data:
        data = data[posix.write(1, data) :]


def main() -> None:
    name, mark, wait_s = sys.argv[1:]
    line = reach(name, time.monotonic() + float(wait_s))
    if line is None:
        write(("\n" + mark + ' {"failure": "not_kept"}\n').encode())
        return
    environment = b"\0".join(key + b"=" + value for key, value in {**posix.environ, b"PWD": posix.getcwdb()}.items())
    job = read_all()
    line.sendall(b"%d %d\n" % (len(environment), len(job)) + environment + job)
    while True:
        piece = line.recv(PIECE)
        if not piece:
            return
        write(piece)
