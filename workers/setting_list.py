"""`python -m toolcrew.workers.setting_list`: print the settings of every process of the worker side as JSON.

`toolcrew config show` runs this module.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, SecretStr, ValidationError

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.invalid_input import find_invalid
from toolcrew.contract.setting_rows import build_rows
from toolcrew.workers.settings import (
    WorkerSettings,
    load_egress_settings,
    load_sandboxd_settings,
    load_web_settings,
    load_worker_settings,
)


def load_worker_or_unset() -> WorkerSettings:
    """Return the worker's settings. A host without workers needs no Redis URL: the URL is then empty.

    Raises ConfigError: another setting is invalid.
    """
    try:
        return load_worker_settings()
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, ValidationError) and [
            entry["loc"] for entry in cause.errors() if entry["type"] == "missing"
        ] == [("redis_url",)]:
            return _without_redis()
        raise


def _without_redis() -> WorkerSettings:
    """Read the settings with an empty Redis URL. Raises ConfigError: another setting is invalid."""
    try:
        return WorkerSettings(redis_url=SecretStr(""))
    except ValidationError as error:
        part = find_invalid(error)
        raise ConfigError(f"TOOLCREW_{str(part.path[0]).upper()}: {part.reason}") from error


PROCESSES: dict[str, Callable[[], BaseModel]] = {
    "worker": load_worker_or_unset,
    "sandboxd": load_sandboxd_settings,
    "web tools": load_web_settings,
    "egress proxy": load_egress_settings,
}


def build_list() -> list[dict[str, Any]]:
    """Return the setting rows of each process, or the reason why the process would not start."""
    return [_build_process(process, load) for process, load in PROCESSES.items()]


def _build_process(process: str, load: Callable[[], BaseModel]) -> dict[str, Any]:
    try:
        return {"process": process, "problem": "", "settings": [asdict(row) for row in build_rows(load())]}
    except ConfigError as error:
        return {"process": process, "problem": str(error), "settings": []}


if __name__ == "__main__":
    json.dump(build_list(), sys.stdout)
