"""Conversion of HTML to readable text in a separate process. A hostile page can crash only this process, which has no
environment variables and bounded memory, time and output. With Landlock it also has no network.
"""

import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.workers.web.limits import Deadline

PARSE_S = 6.0
"""Time limit of one run of the program, in seconds. The CPU time has the same limit."""
MAX_TEXT_BYTES = 24 * 1024 * 1024
_PROGRAM = Path(__file__).with_name("extraction_program.py")

TextFormat = Literal["markdown", "text"]


class _ProgramOutput(BaseModel):
    """Output of the program. The program has read a hostile page, so only these fields of these types are accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    title: str
    text: str
    is_main: bool
    is_too_deep: bool
    whole_chars: int


@dataclass(frozen=True)
class ExtractedText:
    """Text of a page. `note`: a fact about the extraction that the reader must know."""

    title: str
    text: str
    note: str = ""


class Extractor:
    """Runs the extraction program. If the search for the main part fails, the text of the whole page is used."""

    def __init__(self, parse_s: float = PARSE_S) -> None:
        self._parse_s = parse_s

    def extract(self, html: str, url: str, text_format: TextFormat, deadline: Deadline) -> ExtractedText:
        """Return the main part, or the whole text if no main part is found. Raises ToolFailure as
        extract_plain does.
        """
        output = self._run(html, url, text_format, "main", deadline)
        if output is None:
            return self.extract_plain(
                html,
                url,
                text_format,
                deadline,
                "the text of the whole page: the search for its main part failed or took too long",
            )
        return ExtractedText(output.title, output.text, _note(output))

    def extract_plain(
        self, html: str, url: str, text_format: TextFormat, deadline: Deadline, note: str = ""
    ) -> ExtractedText:
        """Return all text of the page. Raises ToolFailure: TIMEOUT past the deadline, FILE_TOO_LARGE when the page
        cannot be read within the limits.
        """
        output = self._run(html, url, text_format, "plain", deadline)
        if output is None:
            raise ToolFailure(
                ErrorCode.FILE_TOO_LARGE,
                "the page's HTML could not be read within the limits of time and memory: fetch it with format=html and "
                "read parts of it",
            )
        return ExtractedText(output.title, output.text, note)

    def _run(
        self, html: str, url: str, text_format: TextFormat, method: str, deadline: Deadline
    ) -> _ProgramOutput | None:
        """Run the program; return None if the program died or wrote invalid output."""
        limit_s = deadline.remaining_s("reading the page", self._parse_s)
        order = {"format": text_format, "url": url, "method": method, "cpu_s": max(1, round(self._parse_s))}
        # Use memory files and no pipes: neither process can block the other, and the program's file size limit bounds
        # its output.
        with _open_memory("page") as stdin, _open_memory("text") as stdout:
            stdin.write(json.dumps(order).encode() + b"\n" + html.encode("utf-8", "replace"))
            stdin.seek(0)
            if not _finishes([sys.executable, "-I", str(_PROGRAM)], stdin.fileno(), stdout.fileno(), limit_s):
                deadline.remaining_s("reading the page")
                return None
            stdout.seek(0)
            return _parse_output(stdout.read(MAX_TEXT_BYTES + 1))


def _note(output: _ProgramOutput) -> str:
    if output.is_too_deep:
        return "the text of the whole page: it nests too deep to find its main part"
    if not output.is_main:
        return "the text of the whole page: no main part was found"
    is_shortened = output.whole_chars > len(output.text)
    return (
        f"the main part of a page with {output.whole_chars} characters of text; format=html gives all of it"
        if is_shortened
        else ""
    )


def _open_memory(name: str) -> BinaryIO:
    return open(os.memfd_create(name), "w+b")


def _finishes(argv: list[str], stdin: int, stdout: int, limit_s: float) -> bool:
    """Run the program and return whether it succeeded in time. Afterwards the program and its
    children no longer run.
    """
    process = None
    try:
        process = subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,
            close_fds=True,
        )
        process_fd = os.pidfd_open(process.pid)
        try:
            waiting = select.poll()
            waiting.register(process_fd, select.POLLIN)
            waiting.poll(limit_s * 1000)
        finally:
            os.close(process_fd)
    finally:
        # An interrupt inside Popen can leave a running program to which no object refers. Its own alarm ends such a
        # program.
        if process is not None:
            # Kill the process group, with all children of the program, before `wait` frees its number.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode == 0


def _parse_output(data: bytes) -> _ProgramOutput | None:
    if len(data) > MAX_TEXT_BYTES:
        return None
    try:
        return _ProgramOutput.model_validate_json(data)
    except ValidationError:
        return None
