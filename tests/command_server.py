"""Run `toolcrew` commands without the start-up time of about one second each. A process that has already imported the
command forks for every call. Page tests that run many commands use this server.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from tests.stack import ROOT, read_line

_CALLER = """\
#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as link:
    link.connect({path!r})
    message = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(link, [len(message).to_bytes(4, "big")], [0, 1, 2])
    link.sendall(message)
    code = link.recv(1)
sys.exit(code[0] if code else 120)
"""


@contextlib.contextmanager
def open_command_server(folder: Path) -> Iterator[Path]:
    """Yield the folder of a `toolcrew` command that this server answers, for use in PATH. The environment, the
    working directory and the streams are those of the caller.
    """
    path = folder / "server"
    caller = folder / "toolcrew"
    caller.write_text(_CALLER.format(python=sys.executable, path=str(path)))
    caller.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.command_server", str(path)], cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        assert read_line(process) == b"ready\n"
        yield folder
    finally:
        process.terminate()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


def serve(path: str) -> None:
    """Serve commands until SIGTERM."""
    from orchestrator.command import import_all

    # All commands are imported before the forks, so that no fork imports one again.
    import_all()

    # The server runs no threads, because a fork of a process with threads may inherit locked locks.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            link, _ = listener.accept()
            with link:
                if os.fork() == 0:
                    # `os._exit` skips the clean-up of the parent's objects, which the fork shares.
                    listener.close()
                    os._exit(_answer(link))
            # Finished children are collected here, so that zombies do not accumulate.
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _answer(link: socket.socket) -> int:
    """Run the command in the forked process, with the caller's streams."""
    head, streams, _, _ = socket.recv_fds(link, 4, 3)
    text = b""
    # A stream socket may deliver the record in several pieces.
    while len(text) < int.from_bytes(head, "big"):
        text += link.recv(1 << 20)
    arguments, folder, environment = json.loads(text)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["toolcrew", *arguments]
    code = _run()
    link.sendall(bytes([code & 255]))
    return code


def _run() -> int:
    from orchestrator.command import main

    code = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001  # the outermost frame of the fork must send an exit code
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    serve(sys.argv[1])
