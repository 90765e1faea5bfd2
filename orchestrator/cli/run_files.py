"""What `toolcrew run` leaves of a run: its trace, and its trajectory as a file of the user's. The answer is never lost
by it.
"""

import json
import os
from pathlib import Path
from typing import Any

from contract.errors import ConfigError
from contract.run_events import RunEvent
from contract.tenancy import DEFAULT_TENANT
from orchestrator.settings import load_settings
from orchestrator.terminal.commands import build_command
from orchestrator.traces.export_atif import build_atif
from orchestrator.traces.reading import Trace, load_trace
from orchestrator.traces.recorder import trace_path


class Leaving:
    """The trace of a run, and, with `output`, the trajectory that is made of it."""

    def __init__(self, output: Path | None) -> None:
        """Raises ConfigError for a file that cannot be written, before anything is paid for."""
        self._folder, self._output = load_settings().traces, output
        self._run = ""
        self._tenant = DEFAULT_TENANT
        self._trace: Trace | None = None
        self.failure: ConfigError | None = None
        if output is not None:
            _check(output)

    def on_event(self, event: RunEvent) -> None:
        """Which run it is: one that breaks off has a trace, too."""
        self._run = self._run or event.run

    def leave(self, tenant: str) -> None:
        """The run is over. What cannot be written is in `failure`."""
        self._tenant = tenant
        if not self._run:
            return
        try:
            path = trace_path(self._folder, tenant, self._run)
            if not path.is_file():
                raise ConfigError(
                    f"the trace {path} could not be written: mend the rights of its folder, or set TOOLCREW_TRACES to "
                    "another"
                )
            self._trace = load_trace(path)
            if self._output is not None:
                write_private(self._output, json.dumps(build_atif(self._trace), indent=2) + "\n")
        except ConfigError as error:
            self.failure = error

    def lines(self) -> list[str]:
        """For people."""
        lines = []
        if self._trace is not None:
            show = build_command("traces", "show", self._run, tenant=self._tenant)
            lines = [f"trace {self._trace.path} (`{show}`)", *self._trace.faults()]
        if self._output is not None and self.failure is None and self._trace is not None:
            lines.append(f"trajectory {self._output}")
        if self.failure is not None:
            lines.append(f"toolcrew: the run is over, and not all that was asked for was written: {self.failure}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """For the command's object."""
        found: dict[str, Any] = {} if self._trace is None else {"trace": str(self._trace.path)}
        if self._output is not None and self._trace is not None and self.failure is None:
            found["trajectory"] = str(self._output)
        if self.failure is not None:
            found["error"] = {"code": self.failure.code.value, "message": str(self.failure)}
        return found


def write_private(path: Path, text: str) -> None:
    """What a run has seen is for nobody else of this host. Raises ConfigError."""
    try:
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): give another file with -o") from error


def _check(output: Path) -> None:
    is_writable = os.access(output if output.exists() else output.parent, os.W_OK)
    if output.is_dir() or not output.parent.is_dir() or not is_writable:
        why = (
            "it is a folder"
            if output.is_dir()
            else "its folder is not there"
            if not output.parent.is_dir()
            else "its rights forbid it"
        )
        raise ConfigError(f"{output} cannot be written ({why}): give another file with -o")
