"""What differs whenever the same call runs again, and says nothing: names made by chance, what something took, numbers
of processes.
"""

import re
from collections.abc import Mapping
from typing import Any

_NAMES = re.compile(
    # A long output's file, as bash_tool names it; what mktemp and Python's tempfile make.
    r"/output/command-[0-9a-f]{8}\.txt|/tmp/tmp(?:\.[A-Za-z0-9]{10}|[a-z0-9_]{8})(?![A-Za-z0-9_])"
)
# Each begins where a number or a word does and reads a bounded number of characters: texts are hostile.
_PARTS = (
    # 0.003s, 1.5 seconds, 12 ms; what bash's time prints; how old a job is.
    (re.compile(r"(?<![\w.])\d{1,12}\.\d{1,12} ?(?:s|secs?|seconds)\b"), "<time>"),
    (re.compile(r"(?<![\w.])\d{1,12}(?:\.\d{1,12})? ?(?:ms|us|µs|ns)\b"), "<time>"),
    (re.compile(r"(?<![\w.])\d{1,9}m\d{1,2}\.\d{1,6}s\b"), "<time>"),
    (re.compile(r"(?<![\w.])\d{1,9} s ago\b"), "<time> ago"),
    # pid 12, PID: 12, process 12; a job that a shell put into the background; whom it saw killed.
    (re.compile(r"(?i)\b(?P<kept>(?:p?pid|process(?: id)?)(?: ?[=:#] ?| ))\d{1,9}\b"), r"\g<kept><process>"),
    (re.compile(r"(?m)^(?P<kept>\[\d{1,4}\][+-]? )\d{1,9}$"), r"\g<kept><process>"),
    (
        re.compile(
            r"(?P<kept>line \d{1,9}:) {1,8}\d{1,9}(?= (?:Killed|Terminated|Aborted|Hangup|Segmentation fault)\b)"
        ),
        r"\g<kept><process>",
    ),
    # When a file was changed, in a long listing.
    (
        re.compile(
            r"(?m)^(?P<kept>[bcdlps-][rwxsStT-]{9}[.+@]? {1,8}\d{1,9} \S{1,64} {1,64}\S{1,64}"
            r" {1,64}[\d,.]{1,20}[KMGT]? )[A-Z][a-z]{2} [ \d]\d {1,2}[\d:]{4,5}(?= )"
        ),
        r"\g<kept><changed>",
    ),
)


def without_volatile(text: str) -> str:
    """The text with a word in place of each such part."""
    text = _NAMES.sub("<temporary>", text)
    for pattern, stand_in in _PARTS:
        text = pattern.sub(stand_in, text)
    return text


def pair_names(old: str, new: str) -> dict[str, str]:
    """Names made by chance in a recorded text -> what stands in their places in the new one; nothing when they are not
    as many.
    """
    then, now = _NAMES.findall(old), _NAMES.findall(new)
    return dict(zip(then, now, strict=True)) if len(then) == len(now) else {}


def rename(value: Any, names: Mapping[str, str]) -> Any:
    """Arguments with the names of now: a call that reads what an earlier one left has to find it."""
    match value:
        case str():
            return _NAMES.sub(lambda found: names.get(found[0], found[0]), value)
        case Mapping():
            return {key: rename(inner, names) for key, inner in value.items()}
        case list():
            return [rename(inner, names) for inner in value]
    return value
