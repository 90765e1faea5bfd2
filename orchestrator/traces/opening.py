"""The traces of one program's runs: where they lie, and what is masked in them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from orchestrator.loop.events import OnEvent, RunEvent
from orchestrator.settings import OrchestratorSettings
from orchestrator.traces.masking import Masker, build_masker, passwords_of
from orchestrator.traces.recorder import TraceRecorder, open_trace


class Traces:
    """`secrets`: what is masked beside what settings and environment hold (kind -> value). `masker`: masks as they
    do.
    """

    def __init__(self, settings: OrchestratorSettings, secrets: Mapping[str, str]) -> None:
        self.folder: Path = settings.traces
        self.masker: Masker = build_masker(settings, secrets)

    @contextmanager
    def open(
        self, tenant: str, run: str, tell: OnEvent, on_warning: Callable[[str], None] = lambda _: None
    ) -> Iterator["Traced"]:
        """The trace of one run. Raises ConfigError for a tenant or run whose name is none; what cannot be written is
        warned of, and ends no run.
        """
        with open_trace(self.folder, tenant, run, masker=self.masker, on_warning=on_warning) as recorder:
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


def secrets_of_pool(redis_url: str, *, flower_url: str | None = None, api_key: str | None = None) -> dict[str, str]:
    """What a client of a pool knows beside its settings: a URL that it was given, what a stack of its own has made up,
    a tenant's key.
    """
    found = {**passwords_of("Redis password", redis_url), **passwords_of("Flower password", flower_url or "")}
    return {**found, **({"API key of the tenant": api_key} if api_key else {})}
