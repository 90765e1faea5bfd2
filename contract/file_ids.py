"""Ids of the files of a tenant: uploads and artifacts, and locations that a workspace may name."""

import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

KEEP_S = 30 * 86_400.0
"""Lifetime of uploads and artifacts, in seconds, the same as that of the records of batches."""
MAX_WORKSPACE_BYTES = 2 * 1024**3
"""Limit of one upload, of one workspace from the store, and of the artifacts of one item, in bytes. The unpacked files
have another limit, that of the workspace in the sandbox (TOOLCREW_SANDBOX_WORKSPACE_BYTES).
"""
SHARED = "@shared"
"""The folder of the store from which every tenant may read. No tenant can have this name."""
NO_STORE = (
    "this deployment has no shared store for workspaces and artifacts: ask the operator to set "
    "TOOLCREW_WORKSPACE_STORE for the API and every sandboxd"
)
_FILE_ID = re.compile(r"(?:file|artifacts)-([0-9a-f]{8})-[0-9a-f]{24}")
MAX_LOCATION_CHARS = 4096


def new_file_id(kind: Literal["file", "artifacts"]) -> str:
    """Return a new id that contains its creation time. Old files can therefore be deleted without a record of them."""
    return f"{kind}-{int(time.time()):08x}-{secrets.token_hex(12)}"


def is_file_id(text: str) -> bool:
    return _FILE_ID.fullmatch(text) is not None


def is_upload(text: str) -> bool:
    return is_file_id(text) and text.startswith("file-")


def is_location(text: str) -> bool:
    """Return whether the name of a workspace is a URL of the store."""
    return "://" in text


def is_stored(text: str) -> bool:
    """Return whether the name of a workspace means a file in the store: the id of a file, or a URL of the store. Any
    other name is a path on a machine.
    """
    return is_file_id(text) or is_location(text)


def file_created_at(file: str) -> float | None:
    """Return the creation time of an upload or of artifacts, in Unix seconds; None for any other name."""
    match = _FILE_ID.fullmatch(file)
    return float(int(match[1], 16)) if match is not None else None


def store_root(setting: str) -> str:
    """Return the URL that all URLs of files in the store begin with."""
    return setting.rstrip("/") if "://" in setting else f"file://{Path(setting).absolute()}"


def parse_location(location: str, setting: str | None, tenant: str) -> str:
    """Return the path, below the root of the store, of a URL of the store. A tenant may name files in its own folder
    and in SHARED.

    Raises ValueError with a sentence for the user: any other URL. Parts such as `..` are refused, because they could
    lead into the folder of another tenant.
    """
    if setting is None:
        raise ValueError(NO_STORE)
    root = store_root(setting)
    path = location.removeprefix(root + "/")
    parts = path.split("/")
    is_plain = location.isprintable() and len(location) <= MAX_LOCATION_CHARS
    if path == location or len(parts) < 2 or not is_plain or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"the file is not in the store: use {root}/{tenant}/... or {root}/{SHARED}/...")
    if parts[0] not in (tenant, SHARED):
        raise ValueError(f"the file does not belong to tenant {tenant}: use {root}/{tenant}/... or {root}/{SHARED}/...")
    return path


@dataclass(frozen=True)
class TenantStore:
    """The part of the store from which a tenant may read. `setting` None: there is no shared store."""

    setting: str | None
    tenant: str

    def explain_refusal(self, workspace: str) -> str | None:
        """Return the reason why a workspace in the store cannot be used; None if the name of the workspace is valid."""
        if is_location(workspace):
            try:
                parse_location(workspace, self.setting, self.tenant)
            except ValueError as error:
                return f"{workspace[:200]!r} cannot be used: {error}"
        return NO_STORE if self.setting is None else None
