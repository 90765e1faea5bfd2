"""A program of its own, run by Python inside a sandbox for each call of a kept MCP server: brings the job on standard
input to the server's keeper (sandbox_driver.py), and hands on what that says.

Arguments: the name of the keeper's abstract socket, the job's mark, and for how many seconds the keeper is waited for.
Where none is, that is said as a keeper's answer would be. Only modules that are part of the interpreter, or of C: json
or socket alone would double what a call takes.
"""

from __future__ import annotations

import _socket
import posix
import sys
import time

PIECE = 65536
PACE_S = 0.005


def reach(name: str, until: float) -> _socket.socket | None:
    """A connection on which the keeper has said that it listens; None: there is none. Until then nothing was asked, and
    asking anew repeats nothing.
    """
    while True:
        line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            line.connect("\0" + name)
            if line.recv(1) == b"+":
                return line
        except OSError:
            # Nobody listens there, or not any more.
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
