"""Settings of logs and tracing, which orchestrators and workers share. Each process has one frozen object."""

import os
from typing import Literal

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.settings import read_environment
from toolcrew.telemetry.log_lines import LogLevel

PROTOCOL = "http/protobuf"
DEFAULT_ENDPOINT = "http://localhost:4318"
"""Default endpoint of OpenTelemetry's exporter."""


class LogSettings(BaseSettings):
    """The log level, which every service reads. Each field is the environment variable `TOOLCREW_<NAME>`."""

    model_config = SettingsConfigDict(env_prefix="TOOLCREW_", frozen=True, extra="ignore", env_ignore_empty=True)

    log_level: LogLevel = "INFO"
    """The least urgent log level that a service writes (docs/observe.md). An operator sets `DEBUG` while looking for a
    fault.
    """


class TracingSettings(BaseSettings):
    """Settings of tracing. `TOOLCREW_TRACING` turns it on. OpenTelemetry's own variables say where spans go and which
    spans are sent (docs/observe.md).
    """

    model_config = SettingsConfigDict(
        env_prefix="TOOLCREW_", frozen=True, extra="ignore", populate_by_name=True, env_ignore_empty=True
    )

    tracing: Literal["off", "otlp", "otlp-content"] = "off"
    """`otlp` sends spans of runs, calls and sessions to a collector (extra `ops`). `otlp-content` adds arguments,
    results and the texts of runs, masked as in trace files (docs/observe.md). An operator turns tracing on to find slow
    calls.
    """
    protocol: str = Field(
        default=PROTOCOL,
        validation_alias=AliasChoices("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"),
    )
    """The protocol of the exporter. Only `http/protobuf` is supported: the operator unsets another value."""
    endpoint: str | None = Field(
        default=None, validation_alias=AliasChoices("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    )
    """The URL of the collector. `toolcrew doctor` checks it. The operator sets it together with TOOLCREW_TRACING."""
    is_disabled: bool = Field(default=False, validation_alias="OTEL_SDK_DISABLED")
    """`true` disables tracing. An operator sets it to stop all spans for a while."""

    @property
    def is_on(self) -> bool:
        """True if spans are recorded."""
        return self.tracing != "off" and not self.is_disabled

    @property
    def has_content(self) -> bool:
        """True if spans contain arguments, results and texts of runs."""
        return self.tracing == "otlp-content"


def load_tracing_settings() -> TracingSettings:
    """Return the settings of this process. Raises ConfigError with the name of an invalid variable."""
    settings = read_environment(TracingSettings, os.environ)
    if settings.is_on and settings.protocol != PROTOCOL:
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is '{settings.protocol[:40]}', but only {PROTOCOL} is supported: set it to "
            "that value or unset it, and use the collector's HTTP port (4318) in OTEL_EXPORTER_OTLP_ENDPOINT"
        )
    return settings
