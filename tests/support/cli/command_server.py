"""Run `toolcrew` commands without the start-up time of about one second each. A process that has already imported the
commands forks for every call. Tests that send signals to a command start a `toolcrew` of their own.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.stack.stack import ROOT, UP_S, Footprint, read_line

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
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.cli.command_server", str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert read_line(process) == b"ready\n"
        try:
            yield folder
        finally:
            process.terminate()


def run_toolcrew(
    footprint: Footprint,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    text: str = "",
    within_s: float = UP_S,
) -> "subprocess.CompletedProcess[str]":
    """Run one `toolcrew` command to its end."""
    return subprocess.run(
        [_shared_command(), *arguments],
        env=footprint.environment(environment),
        input=text,
        capture_output=True,
        text=True,
        timeout=within_s,
        start_new_session=True,
        check=False,
    )


@functools.cache
def _shared_command() -> str:
    """Return the path of the `toolcrew` command of one server for all tests of this process."""
    opened = contextlib.ExitStack()
    atexit.register(opened.close)
    folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="tct-command-", dir="/tmp")))
    return str(opened.enter_context(open_command_server(folder)) / "toolcrew")


def serve(path: str) -> None:
    """Serve commands until SIGTERM, or until stdin is closed because the process of the tests has ended."""
    from toolcrew.orchestrator.command import import_all

    # All commands are imported before the forks, so that no fork imports one again.
    import_all()

    # The server runs no threads, because a fork of a process with threads may inherit locked locks.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
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
    from toolcrew.orchestrator.command import main

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
