"""Explains why a sandbox of an image did not start, from the error texts of the engine and the guest."""

import platform
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from toolcrew.contract.errors import SandboxUnavailable

FOLDERS = "/workspace, /tmp, /home, /output and /opt/toolcrew must be folders in an image, or missing"
_MAX_CHARS = 2000
_NO_FOLDER = re.compile(
    r'to rootfs at "(/[a-z/]{1,40})"[^\n]*(?:: not a directory|cannot be mounted because it is not of type proc)'
    r"|Cannot mkdir: /workspace is not a directory|evalSymlinksInScope: too many links"
)
_CLOSED = re.compile(r"/opt/toolcrew/bin/python3\\?\"?: (?:stat [^\n:]{1,60}: )?permission denied")
_PRINTING_VARIABLES = ("LD_SHOW_AUXV", "LD_TRACE_LOADED_OBJECTS")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Names of processors: the kernel's and those of images."""


def explain_start_failure(error_text: str, image: str) -> str | None:
    """Return which fault of the image caused the error and what to do; None when the image is not the cause.

    `error_text`: the engine's error, or what the container wrote to its stderr. Only its first 2,000 characters are
    examined.
    """
    error_text = error_text[:_MAX_CHARS]
    if _CLOSED.search(error_text) is not None:
        return (
            f"image {image} cannot be a sandbox: user 1000 may not enter its / or /opt; give these folders the mode "
            "755, or use TOOLCREW_SANDBOX_START=oci"
        )
    match = _NO_FOLDER.search(error_text)
    if match is None:
        return None
    return f"image {image} cannot be a sandbox: its {match[1] or '/workspace'} is not a folder; {FOLDERS}"


def explain_unfit(image: Mapping[str, Any], name: str) -> str | None:
    """Return why no sandbox may be made of an image, and what to do; None when it is allowed. `image`: the engine's
    description of the image.
    """
    built_for, here = image.get("Architecture"), _ARCHITECTURES.get(platform.machine())
    if built_for and here and built_for != here:
        return (
            f"image {name} cannot be a sandbox: it is for {str(built_for)[:40]} processors, and this machine has "
            f"{here}; use the image's variant for {here}"
        )
    volumes = ", ".join(sorted((image.get("Config") or {}).get("Volumes") or {}))
    if not volumes:
        return None
    return (
        f"image {name} cannot be a sandbox: it declares volumes ({volumes[:200]}), whose size the "
        "engine does not limit; make an image without volumes: `docker export` a container of the image, then "
        "`docker import` the file"
    )


def check_variables(names: Collection[str], image: str) -> None:
    """Raise SandboxUnavailable if the engine cannot start programs of an image with these variables. The engine can
    make a variable empty, but not remove it.
    """
    for name in _PRINTING_VARIABLES:
        if name in names:
            raise SandboxUnavailable(
                f"image {image} cannot be a sandbox: it sets {name}, with which the loader prints to the channel of "
                "the sandbox; make an image without this variable, or use TOOLCREW_SANDBOX_START=oci"
            )


@contextmanager
def explained(image: str, image_id: str | None = None) -> Iterator[None]:
    """If the block raises SandboxUnavailable because of the image, replace its message by an explanation. In other
    errors, replace the id of the image by its name `image`, which the caller wrote.
    """
    try:
        yield
    except SandboxUnavailable as error:
        named = str(error).replace(image_id, image) if image_id else str(error)
        sentence = explain_start_failure(named, image) or named
        if sentence == str(error):
            raise
        raise SandboxUnavailable(sentence) from error
