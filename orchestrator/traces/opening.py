"""Traces of one program's runs: their folder, and the secrets that are masked in them."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from contract.masking import Masker, passwords_of
from contract.run_events import OnEvent
from orchestrator.settings import OrchestratorSettings, build_masker
from orchestrator.traces.recorder import TraceRecorder, open_trace


class Traces:
    """Traces of one program. `secrets`: masked in addition to the secrets of settings and environment (kind ->
    value).
    """

    def __init__(self, settings: OrchestratorSettings, secrets: Mapping[str, str]) -> None:
        self.folder: Path = settings.traces
        self.masker: Masker = build_masker(settings, secrets)

    def open(
        self, tenant: str, run: str, on_event: OnEvent, on_warning: Callable[[str], None] = lambda _: None
    ) -> AbstractContextManager[TraceRecorder]:
        """Open the trace of one run, as `open_trace` does. The recorder's `on_event` passes each event on to
        `on_event`.
        """
        return open_trace(self.folder, tenant, run, masker=self.masker, on_warning=on_warning, on_event=on_event)


def secrets_of_pool(redis_url: str, *, flower_url: str | None = None, api_key: str | None = None) -> dict[str, str]:
    """Return the secrets that a client of a pool knows in addition to its settings: the passwords in its URLs, and
    its key.
    """
    passwords = {**passwords_of("Redis password", redis_url), **passwords_of("Flower password", flower_url or "")}
    return {**passwords, **({"API key of the tenant": api_key} if api_key else {})}
