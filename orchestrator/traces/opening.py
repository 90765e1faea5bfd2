"""The traces of one program's runs: where they lie, and what is masked in them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from orchestrator.events import OnEvent, RunEvent
from orchestrator.settings import OrchestratorSettings
from orchestrator.traces.masking import build_masker
from orchestrator.traces.recorder import TraceRecorder, open_trace


class Traces:
    """`secrets`: what is masked beside what settings and environment hold (kind -> value)."""

    def __init__(self, settings: OrchestratorSettings, secrets: Mapping[str, str]) -> None:
        self.folder: Path = settings.traces
        self._masker = build_masker(settings, {kind: value for kind, value in secrets.items() if value})

    @contextmanager
    def open(self, tenant: str, run: str, tell: OnEvent, on_warning: Callable[[str], None] = lambda _: None) -> Iterator["Traced"]:
        """The trace of one run. Raises ConfigError for a tenant or run whose name is none; what cannot be written is warned of, and ends no run."""
        with open_trace(self.folder, tenant, run, masker=self._masker, on_warning=on_warning) as recorder:
            yield Traced(recorder, tell)


class Traced:
    """What a run tells its events to: its trace, and whoever listens beside."""

    def __init__(self, recorder: TraceRecorder, tell: OnEvent) -> None:
        self._recorder = recorder
        self._tell = tell

    @property
    def path(self) -> Path:
        """The trace's file."""
        return self._recorder.path

    def on_event(self, event: RunEvent) -> None:
        """The trace first: whoever listens may raise."""
        self._recorder.on_event(event)
        self._tell(event)
