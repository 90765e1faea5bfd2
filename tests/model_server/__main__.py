"""`python -m tests.model_server SCRIPT`: serve until SIGTERM or the end of the parent process. The first printed line
is the server's URL.
"""

import argparse
import asyncio
import contextlib
import ctypes
import os
import re
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.model_server.script import BadScript, Script, load_script
from tests.model_server.service import Chat, Source
from tests.model_server.wire import Connection

BACKLOG = 4096
_PR_SET_PDEATHSIG = 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.model_server", description="An OpenAI-compatible server that plays a script."
    )
    parser.add_argument(
        "script",
        nargs="?",
        type=Path,
        help="JSON lines, as tests/model_server/script.py tells; with --replay only its faults count",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: one that is free")
    parser.add_argument(
        "--record", metavar="URL", help="pass requests on to this endpoint (its base, as in OPENAI_BASE_URL)"
    )
    parser.add_argument("--to", metavar="FILE", type=Path, help="where --record appends its pairs")
    parser.add_argument("--replay", metavar="FILE", type=Path, help="play pairs that --record has written")
    parser.add_argument(
        "--ignore", metavar="PATTERN", action="append", default=[], help="what does not count when messages are matched"
    )
    parser.add_argument("--parent", metavar="PID", type=int, help="leave at once when this is not the parent any more")
    options = parser.parse_args(arguments)
    if (options.record is None) != (options.to is None):
        parser.error("--record and --to go together: name the endpoint and the file")
    if options.record is not None and (options.replay is not None or options.script is not None):
        parser.error("--record plays nothing: leave the script and --replay out")
    if options.record is None and options.replay is None and options.script is None:
        parser.error("name a script, or give --replay FILE, or --record URL --to FILE")
    return options


async def serve(options: argparse.Namespace) -> None:
    """Run the server. Raises BadScript for an invalid script, and OSError for a port that is not available."""
    script = load_script(options.script, needs_rules=options.replay is None) if options.script is not None else Script()
    ignored = _compile(options.ignore)
    async with contextlib.AsyncExitStack() as stack:
        source: Source | None = None
        if options.record is not None:
            # Imported here, because playing a script needs no HTTP client.
            from tests.model_server.recording import Recorder

            recorder = Recorder(options.record, options.to, ignored)
            stack.push_async_callback(recorder.aclose)
            source = recorder
        elif options.replay is not None:
            from tests.model_server.recording import Replay, load_pairs

            source = Replay(load_pairs(options.replay), ignored)
        chat = Chat(script, source)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        server = await loop.create_server(lambda: Connection(chat), options.host, options.port, backlog=BACKLOG)
        port = server.sockets[0].getsockname()[1]
        host = f"[{options.host}]" if ":" in options.host else options.host
        sys.stdout.write(f"http://{host}:{port}/v1\n")
        sys.stdout.flush()
        await ended.wait()
        server.close()


def _compile(patterns: Sequence[str]) -> list["re.Pattern[str]"]:
    try:
        return [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise BadScript(f"--ignore {error.pattern!r} is no regular expression ({error}): correct it") from None


def _die_with_parent(parent: int | None) -> bool:
    """Let the kernel end this process with its parent. Returns False if the parent has already ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return parent is None or os.getppid() == parent


def _allow_connections() -> None:
    """Raise the limit of open files, because each connection is a file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    if not _die_with_parent(options.parent):
        return 0
    _allow_connections()
    try:
        asyncio.run(serve(options))
    except BadScript as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(
            f"cannot listen on {options.host} port {options.port} ({error.strerror}): choose another --port, or 0 for "
            "a free one\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
