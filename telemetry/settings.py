"""What the environment says of tracing: one frozen settings object a process, the same on both sides."""

import os
from typing import Literal

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from contract.errors import ConfigError
from contract.settings import read_environment

PROTOCOL = "http/protobuf"
DEFAULT_ENDPOINT = "http://localhost:4318"
"""Where OpenTelemetry sends spans unless told otherwise."""


class TracingSettings(BaseSettings):
    """`TOOLCREW_TRACING` and `TOOLCREW_TRACING_CONTENT`; where spans go, and which, say OpenTelemetry's own variables
    (docs/tracing.md).
    """

    model_config = SettingsConfigDict(
        env_prefix="TOOLCREW_", frozen=True, extra="ignore", populate_by_name=True, env_ignore_empty=True
    )

    tracing: Literal["off", "otlp"] = "off"
    """otlp: spans of runs, calls and sessions are sent to a collector (extra `ops`)."""
    tracing_content: bool = False
    """True: with arguments, results and the texts of runs, masked as traces are."""
    protocol: str = Field(
        default=PROTOCOL,
        validation_alias=AliasChoices("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"),
    )
    endpoint: str | None = Field(
        default=None, validation_alias=AliasChoices("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    )
    """The collector; the exporter reads it by itself, here it is only looked at (`toolcrew doctor`)."""
    is_disabled: bool = Field(default=False, validation_alias="OTEL_SDK_DISABLED")

    @property
    def is_on(self) -> bool:
        """Whether there are to be spans."""
        return self.tracing == "otlp" and not self.is_disabled


def load_tracing_settings() -> TracingSettings:
    """Settings of this process. Raises ConfigError with the name of the variable that is wrong."""
    settings = read_environment(TracingSettings, os.environ)
    if settings.is_on and settings.protocol != PROTOCOL:
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is '{settings.protocol[:40]}', and spans are sent by {PROTOCOL} alone: set "
            "it to that, or unset it, and name the collector's HTTP port (4318) in OTEL_EXPORTER_OTLP_ENDPOINT"
        )
    return settings
