"""Names of container images, and the patterns that allow them.

A name is read as Docker reads it: `debian` is `docker.io/library/debian:latest`. A pattern is a name with `*`:

- `*` stands for any characters of the repository, with `/`, or of the tag: `ghcr.io/swe-bench/*`, `ghcr.io/a/b:v1.*`.
- A pattern begins with its registry, which has no `*`: `docker.io/library/*`.
- Without a tag, or with the tag `*`, any tag and any digest match.
- `@sha256:*` at the end: only names with a digest match. Such a name cannot be moved to other content.

Two names that mean the same image are equal. Parsing and matching take linear time in the length of the texts.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Final

from pydantic import AfterValidator, Field

MAX_IMAGE_CHARS: Final = 256
"""Limit of the characters of an image name or pattern."""
ImageText = Annotated[str, Field(min_length=1, max_length=MAX_IMAGE_CHARS)]
"""The name of an image in a request, a line of a batch or a call."""
ANY_DIGEST: Final = "sha256:*"
"""End of a pattern, after `@`, that only names with a digest match."""
_OWN_IMAGES: Final = ("toolcrew-sandbox:", "toolcrew-sandbox-")
_HUB: Final = "docker.io"
_HUB_ALIAS: Final = "index.docker.io"
_OFFICIAL: Final = "library/"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_REGISTRY = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::[0-9]{{1,5}})?", re.ASCII)
_REPOSITORY_PART = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*", re.ASCII)
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_ID = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_BARE_ID = re.compile(r"[0-9a-f]{64}", re.ASCII)
_REPOSITORY_PATTERN = re.compile(r"[a-z0-9._*-]+(?:/[a-z0-9._*-]+)*", re.ASCII)
_TAG_PATTERN = re.compile(r"[\w.*-]{1,128}", re.ASCII)
_CACHED = 4096


class ImageNameError(ValueError):
    """An image name or a pattern is malformed. The message says what is wrong and what to write."""


@dataclass(frozen=True)
class ImageName:
    """A name of an image, complete with registry and tag. A name with a digest has no tag, because the engine ignores
    the tag of such a name. A content id (`sha256:...`) has only a digest.
    """

    registry: str
    repository: str
    tag: str | None
    digest: str | None

    @property
    def is_id(self) -> bool:
        """Return whether the name is a content id of the engine. Such an image cannot be pulled."""
        return not self.repository

    @property
    def full(self) -> str:
        """Return the complete name. The engine cannot mistake it for the first characters of a content id."""
        return self.digest or "" if self.is_id else f"{self.registry}/{self.repository}{self._version}"

    @property
    def short(self) -> str:
        """Return the name as people write it: without Docker Hub's registry and without the tag `latest`."""
        if self.registry != _HUB:
            return self.full
        version = "" if self.tag == "latest" else self._version
        official = self.repository.removeprefix(_OFFICIAL)
        text = f"{self.repository if '/' in official else official}{version}"
        # `docker.io/a.b/c` without its registry would name the registry `a.b`.
        is_ambiguous = _ID.fullmatch(text) or ("/" in text and _is_registry(text.partition("/")[0]))
        return self.full if is_ambiguous else text

    @property
    def _version(self) -> str:
        return f"@{self.digest}" if self.digest is not None else f":{self.tag}"


@dataclass(frozen=True)
class ImagePattern:
    """An exact image name (`name` is set), or a pattern with `*` (`name` is None).

    For a pattern, `repository` and `tag` are the pieces of text before, between and after the `*`: `a/*-x` gives
    `("a/", "-x")`. A `tag` of None matches every tag and digest. `names_registry`: the text begins with a registry.
    """

    text: str
    name: ImageName | None
    names_registry: bool
    registry: str = ""
    repository: tuple[str, ...] = ()
    tag: tuple[str, ...] | None = None
    needs_digest: bool = False

    def matches(self, name: ImageName) -> bool:
        """Return whether the pattern matches the image name."""
        if self.name is not None:
            return name == self.name
        if name.is_id or name.registry != self.registry or not _fits(self.repository, name.repository):
            return False
        if name.tag is None:
            return self.tag is None
        return not self.needs_digest and (self.tag is None or _fits(self.tag, name.tag))


@lru_cache(_CACHED)
def parse_image_name(text: str) -> ImageName:
    """Parse an image name as Docker does. Raises ImageNameError."""
    _check_length(text, "image name")
    if _ID.fullmatch(text):
        return ImageName("", "", None, text)
    before, at, digest = text.partition("@")
    if at and not _ID.fullmatch(digest):
        raise ImageNameError(
            f"image name '{text}' has an invalid digest: write @sha256: and 64 hexadecimal digits in lower case"
        )
    registry, path = _split_registry(before)
    repository, colon, tag = path.partition(":")
    if not all(_REPOSITORY_PART.fullmatch(part) for part in repository.split("/")):
        raise ImageNameError(
            f"image name '{text}' has an invalid repository: write lower case letters and digits, with single "
            "separators . _ - / between them"
        )
    if _BARE_ID.fullmatch(repository):
        raise ImageNameError(f"image name '{text}' is a content id: write sha256:{repository}")
    if colon and not _TAG.fullmatch(tag):
        raise ImageNameError(
            f"image name '{text}' has an invalid tag: write at most 128 letters, digits and the characters . _ -"
        )
    if registry == _HUB and "/" not in repository:
        repository = _OFFICIAL + repository
    return ImageName(registry, repository, None if at else tag or "latest", digest if at else None)


@lru_cache(_CACHED)
def parse_image_pattern(text: str) -> ImagePattern:
    """Parse an exact image name or a pattern. Raises ImageNameError."""
    _check_length(text, "image pattern")
    first, slash, path = text.partition("/")
    names_registry = bool(slash) and _is_registry(first)
    if "*" not in text:
        return ImagePattern(text, parse_image_name(text), names_registry)
    if not names_registry or "*" in first:
        raise ImageNameError(
            f"image pattern '{text}' has a * in its registry or no registry: begin it with docker.io/, ghcr.io/ "
            f"or another registry"
        )
    before, at, digest = text.partition("@")
    if at and digest != ANY_DIGEST:
        raise ImageNameError(f"image pattern '{text}' has an invalid digest: write @{ANY_DIGEST}, or an exact name")
    registry, path = _split_registry(before)
    repository, colon, tag = path.partition(":")
    if not _REPOSITORY_PATTERN.fullmatch(repository):
        raise ImageNameError(
            f"image pattern '{text}' has an invalid repository: write lower case letters, digits and . _ - / *"
        )
    if colon and (at or not _TAG_PATTERN.fullmatch(tag)):
        raise ImageNameError(
            f"image pattern '{text}' has an invalid tag: write letters, digits and . _ - *, and no tag before a digest"
        )
    if registry == _HUB and "/" not in repository and "*" not in repository:
        repository = _OFFICIAL + repository
    return ImagePattern(
        text,
        None,
        names_registry,
        registry,
        tuple(repository.split("*")),
        None if tag.strip("*") == "" else tuple(tag.split("*")),
        needs_digest=bool(at),
    )


def find_matches(patterns: Iterable[str], name: ImageName) -> Iterator[ImagePattern]:
    """Yield the names and patterns that match. A malformed pattern matches nothing: another release may have
    written it.
    """
    for text in patterns:
        try:
            pattern = parse_image_pattern(text)
        except ImageNameError:
            continue
        if pattern.matches(name):
            yield pattern


def is_allowed(patterns: Iterable[str], name: ImageName) -> bool:
    """Return whether one of the names and patterns matches the image name."""
    return any(True for _ in find_matches(patterns, name))


def may_share(first: str, second: str) -> bool:
    """Return whether two names or patterns may have an image in common. Two patterns are compared by registry
    only. Malformed texts have none in common.
    """
    try:
        one, other = parse_image_pattern(first), parse_image_pattern(second)
    except ImageNameError:
        return False
    if one.name is not None:
        return other.matches(one.name)
    return one.matches(other.name) if other.name is not None else one.registry == other.registry


def _check_length(text: str, subject: str) -> None:
    if not 0 < len(text) <= MAX_IMAGE_CHARS:
        raise ImageNameError(f"{subject} '{text[:40]}' has {len(text)} characters: write 1 to {MAX_IMAGE_CHARS}")


def _is_registry(first: str) -> bool:
    """Return whether the first part of a name is a registry. Docker decides the same way."""
    return "." in first or ":" in first or first == "localhost"


def _split_registry(text: str) -> tuple[str, str]:
    first, slash, rest = text.partition("/")
    if not slash or not _is_registry(first):
        return _HUB, text
    if not _REGISTRY.fullmatch(first):
        raise ImageNameError(
            f"image '{text}' has an invalid registry '{first}': write a host name, and :PORT if needed"
        )
    registry = first.lower()
    return (_HUB if registry == _HUB_ALIAS else registry), rest


def _fits(parts: tuple[str, ...], text: str) -> bool:
    """Return whether the text consists of the parts in order, with any characters between them."""
    if len(parts) == 1:
        return text == parts[0]
    first, *middle, last = parts
    at, end = len(first), len(text) - len(last)
    if at > end or not text.startswith(first) or not text.endswith(last):
        return False
    for part in middle:
        # The leftmost occurrence leaves the most text for the other parts, so no other occurrence has to be tried.
        found = text.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def advise_missing(image: str) -> str:
    """Return what an operator does about an image that the engine of a host lacks."""
    if image.startswith(_OWN_IMAGES):
        return "build it with scripts/build-image"
    return "build it, or pull it, with the engine of that host"


def _check_name(text: str) -> str:
    parse_image_name(text)
    return text


def _check_pattern(text: str) -> str:
    parse_image_pattern(text)
    return text


def _check_registry(text: str) -> str:
    """Return the registry in the form that complete image names contain."""
    registry, repository = _split_registry(f"{text}/x")
    if "/" in text or repository != "x":
        raise ImageNameError(f"registry '{text}' is not a host name with a dot or a port: write docker.io or HOST:PORT")
    return registry


_Text = Annotated[str, Field(min_length=1, max_length=MAX_IMAGE_CHARS)]
ImageNameText = Annotated[_Text, AfterValidator(_check_name)]
"""Text of one image name. Validation rejects a malformed name."""
ImagePatternText = Annotated[_Text, AfterValidator(_check_pattern)]
"""Text of an image name or a pattern. Validation rejects a malformed text."""
RegistryText = Annotated[_Text, AfterValidator(_check_registry)]
"""Text of an image registry, such as `ghcr.io`. Validation rejects a malformed text."""
