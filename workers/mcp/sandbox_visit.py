"""A standalone program that Python runs inside a sandbox for each call of a kept MCP server. It sends the job on
standard input to the daemon (sandbox_driver.py) and copies the daemon's answer to standard output.

Arguments: the name of the daemon's abstract socket, the mark of the job, and the seconds to wait for the daemon. If
no daemon listens, the program writes this failure in the format of a daemon. The program imports only built-in and C
modules, because importing json or socket would double the duration of a call.
"""

from __future__ import annotations

import _socket
import posix
import sys
import time

PIECE = 65536
RETRY_S = 0.005


def connect(name: str, until: float) -> _socket.socket | None:
    """Return a connection to a daemon that is ready; None if there is no daemon. The caller may retry safely, because
    no request has been sent yet.
    """
    while True:
        connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            connection.connect("\0" + name)
            if connection.recv(1) == b"+":
                return connection
        except OSError:
            # No daemon listens on this name, or the daemon has just ended.
            pass
        connection.close()
        if time.monotonic() >= until:
            return None
        time.sleep(RETRY_S)


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
    connection = connect(name, time.monotonic() + float(wait_s))
    if connection is None:
        write(("\n" + mark + ' {"failure": "not_kept"}\n').encode())
        return
    environment = b"\0".join(key + b"=" + value for key, value in {**posix.environ, b"PWD": posix.getcwdb()}.items())
    job = read_all()
    connection.sendall(b"%d %d\n" % (len(environment), len(job)) + environment + job)
    while True:
        piece = connection.recv(PIECE)
        if not piece:
            return
        write(piece)
