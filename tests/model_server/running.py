"""A model server for a test, in a separate process that ends with the block."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
ANSWER_S = 90.0
STOP_S = 60.0


class DidNotStart(RuntimeError):
    """The server did not start. The message is the server's own output."""


@dataclass(frozen=True)
class ModelServer:
    """A running server. `url`: the value for OPENAI_BASE_URL."""

    url: str
    pid: int

    def stats(self) -> dict[str, Any]:
        """Return the counters, as listed in tests/model_server/script.py."""
        with urllib.request.urlopen(f"{self._root}/stats", timeout=ANSWER_S) as answer:
            reply: dict[str, Any] = json.load(answer)
        return reply

    def reset(self) -> None:
        """Reset the counters, the counted faults and the position in a recording."""
        request = urllib.request.Request(f"{self._root}/reset", data=b"", method="POST")
        urllib.request.urlopen(request, timeout=ANSWER_S).close()

    def environment(self, model: str = "played") -> dict[str, str]:
        """Return the environment that a program needs to use the server."""
        return {"OPENAI_BASE_URL": self.url, "OPENAI_API_KEY": "no-key-needed", "TOOLCREW_MODEL": model}

    @property
    def _root(self) -> str:
        return self.url.removesuffix("/v1")


@contextlib.contextmanager
def running_model_server(
    script: Path | Iterable[Mapping[str, Any]] | None = None, *, options: Sequence[str] = (), port: int = 0
) -> Iterator[ModelServer]:
    """Run a server on loopback that plays `script`: a file, or its lines as records. `options`: further command-line
    options, such as --replay.

    Enter the block in a thread that outlives the block: the kernel ends the server with the thread that started it.
    Raises DidNotStart.
    """
    with tempfile.TemporaryDirectory(prefix="toolcrew-model-") as folder:
        given = [str(_write(script, Path(folder)))] if script is not None else []
        argv = [
            sys.executable,
            "-m",
            "tests.model_server",
            *given,
            "--port",
            str(port),
            "--parent",
            str(os.getpid()),
            *options,
        ]
        with (Path(folder) / "errors").open("w+b") as errors:
            child = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
            try:
                assert child.stdout is not None
                with child.stdout:
                    # The stream ends with the process, so this read always returns.
                    url = child.stdout.readline().decode().strip()
                    if not url:
                        child.wait(STOP_S)
                        errors.seek(0)
                        raise DidNotStart(
                            errors.read().decode(errors="replace").strip()
                            or "the model server ended without a word: run it by hand"
                        )
                    yield ModelServer(url, child.pid)
            finally:
                child.terminate()
                try:
                    child.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
                errors.seek(0)
                # The server's complaints belong into the output of the test.
                sys.stderr.write(errors.read().decode(errors="replace"))


def _write(script: Path | Iterable[Mapping[str, Any]], folder: Path) -> Path:
    if isinstance(script, Path):
        return script.resolve()
    path = folder / "script.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in script))
    return path
