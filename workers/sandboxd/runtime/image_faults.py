"""Explains why a sandbox of an image did not start, from the error texts of the engine and the guest."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from contract.errors import SandboxUnavailable

_NEEDS = "an image needs python3, 3.9 or later, with its whole standard library, of this machine's kind of processor"
FOLDERS = "/workspace, /tmp, /output and /opt/toolcrew must be folders in an image, or missing"
_MAX_CHARS = 2000


def explain_start_failure(error_text: str, image: str) -> str | None:
    """Return what the error text says about the image, and what to do; None when it is about something else.

    `error_text`: the engine's error, or what the container wrote to its stderr. Only its first 2,000 characters are
    examined.
    """
    head = error_text[:_MAX_CHARS]
    for pattern, explain in _FAULTS:
        found = pattern.search(head)
        if found is not None:
            return f"image {image} cannot be a sandbox: {explain(found)}"
    return None


def explain_unfit(config: Mapping[str, Any], image: str) -> str | None:
    """Return why no sandbox may be made of an image with that `Config`, and what to do; None when it is allowed."""
    volumes = ", ".join(sorted(config.get("Volumes") or {}))
    if not volumes:
        return None
    return (
        f"image {image} cannot be a sandbox: it declares volumes ({volumes[:200]}), which the engine makes as host "
        "disk without a limit; make an image without them from its files, by docker export of a container of it and "
        "docker import"
    )


@contextmanager
def explained(image: str) -> Iterator[None]:
    """Explain a SandboxUnavailable inside the block when the image causes it. Other errors pass unchanged."""
    try:
        yield
    except SandboxUnavailable as error:
        sentence = explain_start_failure(str(error), image)
        if sentence is None:
            raise
        raise SandboxUnavailable(sentence) from error


def _say(sentence: str) -> Callable[[re.Match[str]], str]:
    return lambda _: sentence


# The program is always the guest's python3, because nothing else is started from outside. The most specific patterns
# come first.
_FAULTS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (
        re.compile(r"toolcrew guest: this image's python3 is (\d{1,3}\.\d{1,3});"),
        lambda found: f"its python3 is {found[1]}; use an image with 3.9 or later",
    ),
    (
        re.compile(
            r"toolcrew guest: this image's python3 lacks a part of the standard library: "
            r"No module named '([A-Za-z0-9_.]{1,40})'"
        ),
        lambda found: (
            f"its python3 has no module '{found[1]}'; install the whole of Python (Debian: python3, not "
            "python3-minimal)"
        ),
    ),
    (
        re.compile(r"toolcrew guest: this image's python3 lacks a part"),
        _say("its python3 lacks a part of the standard library; install the whole of Python"),
    ),
    (
        re.compile(r"executable file not found in \$PATH|exec: \"[^\"]{0,200}python3\": stat "),
        _say(f"it has no python3 that may be run in /usr/local/bin, /usr/bin or /bin; {_NEEDS}"),
    ),
    (
        re.compile(r"exec format error", re.IGNORECASE),
        _say("its python3 is for another processor than this machine's; use the image's variant for this one"),
    ),
    (
        re.compile(r"exec [^\n]{0,200}python3: no such file or directory|exec: \"[^\"]{0,200}python3\": no such file"),
        _say(f"its python3 cannot be loaded, as its loader or a link's target is missing; {_NEEDS}"),
    ),
    (
        re.compile(r"python3: error while loading shared libraries: ([A-Za-z0-9_.+-]{1,80})"),
        lambda found: f"its python3 lacks the library {found[1]}; build the image with all that its Python needs",
    ),
    (
        re.compile(
            r"exec [^\n]{0,200}python3: permission denied|exec: \"[^\"]{0,200}python3\": permission denied",
            re.IGNORECASE,
        ),
        _say("its python3 may not be run by uid 1000; make it readable and executable for all"),
    ),
    (
        re.compile(
            r'to rootfs at "(/[a-z/]{1,40})"[^\n]*'
            r"(?:: not a directory|cannot be mounted because it is not of type proc)"
        ),
        lambda found: f"its {found[1]} is not a folder; {FOLDERS}",
    ),
    (
        re.compile(r"Cannot mkdir: /workspace is not a directory|evalSymlinksInScope: too many links"),
        _say(f"its /workspace is not a folder; {FOLDERS}"),
    ),
    (
        re.compile(r"can't find '__main__' module in '/opt/toolcrew'|can't open file '/opt/toolcrew'"),
        _say(
            "there is no guest in /opt/toolcrew: build the image FROM the toolcrew image, or remove its label "
            "toolcrew.guest to have the guest mounted"
        ),
    ),
    (
        re.compile(r"Fatal Python error: |ModuleNotFoundError: No module named '(?:encodings|codecs)'"),
        _say(f"its python3 does not start; {_NEEDS}"),
    ),
    (
        re.compile(r"toolcrew guest: (unknown option|--[a-z]{1,20} without a value)"),
        _say("its guest is of another version than this sandboxd; build it again with scripts/build-image"),
    ),
)
