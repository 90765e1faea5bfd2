"""Settings of a process as rows for display: name, value and origin. Secrets are masked."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr

from toolcrew.contract.masking import Masker
from toolcrew.contract.settings import variable_names

MASK = "********"
_REDIS = ("redis", "rediss", "sentinel")


@dataclass(frozen=True)
class SettingRow:
    """Setting as one row. `value` and `default` have the form of the environment variable, or are None if there is no
    value.
    """

    name: str
    value: str | None
    default: str | None
    origin: str


def build_rows(settings: BaseModel) -> Iterator[SettingRow]:
    """Yield a row for every field, in the order of the class. The environment is the only source of settings."""
    masker = Masker()
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        # The default of a factory depends on this host. If the setting is not set, its value is the default.
        default = field.get_default() if not field.is_required() and field.default_factory is None else None
        is_given = name in settings.model_fields_set
        if field.default_factory is not None and not is_given:
            default = value
        yield SettingRow(
            name=variable_names(name, field)[0],
            value=_shown(value, masker),
            default=_shown(default, masker),
            origin="environment" if is_given and value != SecretStr("") else "default",
        )


def _shown(value: object, masker: Masker) -> str | None:
    """Return the value as text, without declared secrets, passwords in URLs, and texts in the form of well-known
    keys.
    """
    if value is None:
        return None
    if isinstance(value, SecretStr):
        return _without_secret(value.get_secret_value()) if value.get_secret_value() else None
    if isinstance(value, str):
        return masker.mask(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    return masker.mask(
        str(value) if isinstance(value, PurePath | Enum) else json.dumps(_plain(value), ensure_ascii=False)
    )


def _plain(value: object) -> Any:
    if isinstance(value, SecretStr):
        return MASK
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(part) for part in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _without_secret(text: str) -> str:
    """Return the address in a Redis URL without its credentials, which helps to find errors; a mask for other texts."""
    try:
        parts = [urlsplit(one) for one in text.split(";")]
        if all(
            part.scheme in _REDIS and part.hostname and part.path.strip("/").isdigit() == bool(part.path.strip("/"))
            for part in parts
        ):
            return ";".join(
                f"{part.scheme}://{MASK + '@' if '@' in part.netloc else ''}{part.netloc.rpartition('@')[2]}{part.path}"
                for part in parts
            )
    except ValueError:
        return MASK
    return MASK
