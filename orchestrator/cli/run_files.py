"""Files that `toolcrew run` writes: the trace of the run, and its trajectory for the user. The answer is kept if a
file cannot be written.
"""

import json
import os
from pathlib import Path
from typing import Any

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.run_events import RunEvent
from toolcrew.contract.settings import load_settings
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.orchestrator.terminal.commands import build_command
from toolcrew.orchestrator.traces.export_atif import build_atif
from toolcrew.orchestrator.traces.reading import Trace, load_trace
from toolcrew.orchestrator.traces.recorder import trace_path


class RunFiles:
    """The trace of a run and, with `output`, the trajectory that is built from it."""

    def __init__(self, output: Path | None) -> None:
        """Prepare the trace and the trajectory before the run starts. `output`: file of the trajectory; None: write no
        trajectory. Raises ConfigError for a file that cannot be written.
        """
        self._folder = load_settings().traces
        self._output = output
        self._run = ""
        self._tenant = DEFAULT_TENANT
        self._trace: Trace | None = None
        self.failure: ConfigError | None = None
        if output is not None:
            _check_output(output)

    def on_event(self, event: RunEvent) -> None:
        """Record the id of the run from its first event: a run that fails has a trace, too."""
        self._run = self._run or event.run

    def write(self, tenant: str) -> None:
        """Write the trajectory after the run. Sets `failure` if the file cannot be written."""
        self._tenant = tenant
        if not self._run:
            return
        try:
            path = trace_path(self._folder, tenant, self._run)
            if not path.is_file():
                raise ConfigError(
                    f"the trace {path} could not be written: fix the permissions of its folder, or set "
                    "TOOLCREW_TRACES to another folder"
                )
            self._trace = load_trace(path)
            if self._output is not None:
                write_private(self._output, json.dumps(build_atif(self._trace), indent=2) + "\n")
        except ConfigError as error:
            self.failure = error

    def lines(self) -> list[str]:
        """Return the lines for the terminal that name the written files."""
        lines = []
        if self._trace is not None:
            show = build_command("traces", "show", self._run, tenant=self._tenant)
            lines = [f"trace {self._trace.path} (`{show}`)", *self._trace.faults()]
        if self._output is not None and self.failure is None and self._trace is not None:
            lines.append(f"trajectory {self._output}")
        if self.failure is not None:
            lines.append(f"toolcrew: the run has ended, but a file was not written: {self.failure}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the command's JSON object that name the written files."""
        fields: dict[str, Any] = {} if self._trace is None else {"trace": str(self._trace.path)}
        if self._output is not None and self._trace is not None and self.failure is None:
            fields["trajectory"] = str(self._output)
        if self.failure is not None:
            fields["error"] = {"code": self.failure.code.value, "message": str(self.failure)}
        return fields


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read: a run may contain secrets. Raises ConfigError."""
    try:
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): give another file with -o") from error


def _check_output(output: Path) -> None:
    is_writable = os.access(output if output.exists() else output.parent, os.W_OK)
    if output.is_dir() or not output.parent.is_dir() or not is_writable:
        reason = (
            "it is a folder"
            if output.is_dir()
            else "its folder does not exist"
            if not output.parent.is_dir()
            else "its permissions forbid it"
        )
        raise ConfigError(f"{output} cannot be written ({reason}): give another file with -o")
