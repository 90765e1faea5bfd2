"""Names and patterns of images: read as Docker reads them, and never wider than they look."""

import contextlib
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from toolcrew.contract.image_names import (
    MAX_IMAGE_CHARS,
    ImageName,
    ImageNameError,
    advise_missing,
    find_matches,
    is_allowed,
    parse_image_name,
    parse_image_pattern,
)

HEX = "0123456789abcdef" * 4
DIGEST = f"sha256:{HEX}"

words = st.sampled_from(["a", "b0", "a.b", "a_b", "a__b", "a--b", "library", "localhost", "sha256", "deadbeef"])
registries = st.sampled_from(["docker.io", "ghcr.io", "localhost", "registry:5000", "127.0.0.1:5000", "[::1]:5000"])
repositories = st.lists(words, min_size=1, max_size=3).map("/".join)
tags = st.sampled_from(["latest", "v1.2", "_", "A-b", HEX])
versions = st.one_of(st.just(""), tags.map(":{}".format), st.just(f"@{DIGEST}"), tags.map(f":{{}}@{DIGEST}".format))
names = st.builds("{}{}{}".format, st.just("") | registries.map("{}/".format), repositories, versions)


# Names


@pytest.mark.parametrize(
    ("text", "full", "short"),
    [
        ("debian", "docker.io/library/debian:latest", "debian"),
        ("debian:latest", "docker.io/library/debian:latest", "debian"),
        ("docker.io/debian", "docker.io/library/debian:latest", "debian"),
        ("index.docker.io/library/debian:12", "docker.io/library/debian:12", "debian:12"),
        ("team/tool", "docker.io/team/tool:latest", "team/tool"),
        ("library/a/b", "docker.io/library/a/b:latest", "library/a/b"),
        ("docker.io/a.b/c", "docker.io/a.b/c:latest", "docker.io/a.b/c:latest"),
        ("localhost:5000", "docker.io/library/localhost:5000", "localhost:5000"),
        ("localhost/tool", "localhost/tool:latest", "localhost/tool:latest"),
        ("GHCR.io/Team".lower(), "ghcr.io/team:latest", "ghcr.io/team:latest"),
        ("GHCR.IO/team/tool", "ghcr.io/team/tool:latest", "ghcr.io/team/tool:latest"),
        ("registry:5000/team/tool:v1", "registry:5000/team/tool:v1", "registry:5000/team/tool:v1"),
        ("[::1]:5000/tool", "[::1]:5000/tool:latest", "[::1]:5000/tool:latest"),
        (f"debian:12@{DIGEST}", f"docker.io/library/debian@{DIGEST}", f"debian@{DIGEST}"),
        (f"docker.io/library/{DIGEST}", f"docker.io/library/{DIGEST}", f"docker.io/library/{DIGEST}"),
        (DIGEST, DIGEST, DIGEST),
    ],
)
def test_image_name_is_completed_as_by_docker(text: str, full: str, short: str) -> None:
    name = parse_image_name(text)
    assert (name.full, name.short) == (full, short)


@given(names)
def test_full_and_short_name_parse_to_the_same_image(text: str) -> None:
    name = parse_image_name(text)
    assert parse_image_name(name.full) == parse_image_name(name.short) == name
    assert (name.tag is None) == (name.digest is not None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "write 1 to 256"),
        ("a" * 257, "has 257 characters"),
        ("Debian", "invalid repository"),
        *[(text, "invalid repository") for text in ("a//b", "/a", "a/", "a..b", "a b", "a\n", "ä", "ghcr.io/*")],
        *[(text, "invalid registry") for text in ("../../etc", "-x.io/a", "http://host.io/a", "registry:port/a")],
        *[(text, "invalid tag") for text in ("a:", "a:b:c", "a:-x", "a:" + "x" * 129)],
        *[(text, "invalid digest") for text in ("user:pw@host.io/a", "a@sha256:12")],
        (f"a@{DIGEST.upper()}", "invalid digest"),
        (f"a@md5:{HEX}", "invalid digest"),
        (f"a@{DIGEST}@{DIGEST}", "invalid digest"),
        (HEX, "is a content id: write sha256:"),
    ],
)
def test_malformed_image_name_is_refused_with_a_reason(text: str, reason: str) -> None:
    with pytest.raises(ImageNameError, match=reason):
        parse_image_name(text)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        *[(text, "in its registry or no registry") for text in ("*", "*/a", "team/*", "*.io/a", "registry:*/a")],
        *[(text, "invalid repository") for text in ("ghcr.io/A*", "ghcr.io//*", "ghcr.io/?*", "Debian")],
        ("ghcr.io/a:*:*", "invalid tag"),
        ("ghcr.io/a:v*@sha256:*", "no tag before a digest"),
        *[(text, r"write @sha256:\*") for text in ("ghcr.io/a@*", "ghcr.io/a@sha256:12*")],
        ("ghcr.io/*" + "a" * 256, "has 265 characters"),
    ],
)
def test_malformed_image_pattern_is_refused_with_a_reason(pattern: str, reason: str) -> None:
    with pytest.raises(ImageNameError, match=reason):
        parse_image_pattern(pattern)


@given(st.text(max_size=300))
@example("[:]:5/a")
def test_any_text_is_parsed_or_raises_image_name_error(text: str) -> None:
    for parse in (parse_image_name, parse_image_pattern):
        with contextlib.suppress(ImageNameError):
            parse(text)


# Patterns


def matches(pattern: str, name: str) -> bool:
    return parse_image_pattern(pattern).matches(parse_image_name(name))


SWE = "ghcr.io/swe-bench/*"


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("debian", ["docker.io/library/debian:latest"], ["debian:12", f"debian@{DIGEST}"]),
        ("debian:12", ["debian:12"], [f"debian:12@{DIGEST}"]),  # the engine would ignore the tag
        ("docker.io/library/debian", ["debian"], []),
        (SWE, ["ghcr.io/swe-bench/a", "ghcr.io/swe-bench/a/b:v1", f"ghcr.io/swe-bench/a@{DIGEST}"], []),
        (SWE, [], ["ghcr.io/swe-bench", "ghcr.io/swe-benchmark/a", "evil.io/ghcr.io/swe-bench/a"]),
        (SWE, [], ["ghcr.io:443/swe-bench/a", "ghcr.io.evil.io/swe-bench/a"]),
        ("GHCR.io/swe-bench/*", ["ghcr.io/swe-bench/a"], []),
        ("registry:5000/team/*", ["registry:5000/team/tool"], ["registry:5001/team/tool", "registry/team/tool"]),
        ("docker.io/*", ["debian", "team/tool"], ["ghcr.io/a/b", DIGEST]),
        ("docker.io/library/*", ["debian"], ["team/tool"]),
        ("docker.io/debian:*", ["debian:12"], ["debian-evil"]),
        ("ghcr.io/a/b:*", ["ghcr.io/a/b", f"ghcr.io/a/b:v1@{DIGEST}"], []),
        ("ghcr.io/a/b:v1.*", ["ghcr.io/a/b:v1.2"], ["ghcr.io/a/b:v2.1", f"ghcr.io/a/b:v1.1@{DIGEST}"]),
        ("ghcr.io/*/tool-*-x", ["ghcr.io/a/b/tool-1-x"], []),
        ("ghcr.io/a/*@sha256:*", [f"ghcr.io/a/b:v1@{DIGEST}"], ["ghcr.io/a/b:v1"]),
        (f"ghcr.io/a/b@{DIGEST}", [f"ghcr.io/a/b:v1@{DIGEST}"], []),
        (DIGEST, [DIGEST], []),
        ("ghcr.io/a/*a*a", [], ["ghcr.io/a/a"]),
    ],
)
def test_pattern_matches_only_the_listed_names(pattern: str, matching: list[str], others: list[str]) -> None:
    assert [name for name in matching if not matches(pattern, name)] == []
    assert [name for name in others if matches(pattern, name)] == []


@given(names, names)
def test_exact_pattern_matches_only_the_same_image(pattern: str, text: str) -> None:
    assert matches(pattern, pattern)
    assert matches(pattern, text) == (parse_image_name(pattern) == parse_image_name(text))


@given(names, registries)
def test_pattern_never_matches_another_registry(text: str, registry: str) -> None:
    name = parse_image_name(text)
    assert matches(f"{registry}/*", text) == (name.registry == registry)
    assert not matches(f"{registry}/*", DIGEST)


def matches_naively(parts: list[str], text: str) -> bool:
    """Return the same as the matcher, by trying every place."""
    if len(parts) == 1:
        return text == parts[0]
    return text.startswith(parts[0]) and any(
        matches_naively(parts[1:], text[at:]) for at in range(len(parts[0]), len(text) + 1)
    )


@given(st.text("ab*", max_size=8), st.text("ab", min_size=1, max_size=8))
def test_pattern_matching_agrees_with_a_naive_matcher(middle: str, repository: str) -> None:
    pattern = f"x{middle}*"
    assert matches(f"ghcr.io/{pattern}", f"ghcr.io/x{repository}") == matches_naively(
        pattern.split("*"), f"x{repository}"
    )


def test_hostile_pattern_and_name_take_under_10_ms() -> None:
    pattern = parse_image_pattern("ghcr.io/" + "*a" * 120 + "*b")
    name = ImageName("ghcr.io", "a" * 4000, "latest", None)
    started_at = time.perf_counter()
    for _ in range(100):
        assert not pattern.matches(name)
    assert time.perf_counter() - started_at < 1.0
    started_at = time.perf_counter()
    for _ in range(100):
        with pytest.raises(ImageNameError):
            parse_image_name("a" + "-" * (MAX_IMAGE_CHARS - 1))
    assert time.perf_counter() - started_at < 1.0


def test_invalid_pattern_matches_nothing() -> None:
    name = parse_image_name("debian")
    assert not is_allowed(["*", "Debian"], name)
    assert is_allowed(["*", "debian"], name)
    assert [match.names_registry for match in find_matches(["*", "docker.io/*", "debian"], name)] == [True, False]


@given(repositories, st.data())
def test_star_matches_any_part_of_the_repository(repository: str, data: st.DataObject) -> None:
    start, end = sorted((data.draw(st.integers(0, len(repository))), data.draw(st.integers(0, len(repository)))))
    pattern = f"ghcr.io/{repository[:start]}*{repository[end:]}"
    if "//" in pattern:
        return
    assert matches(pattern, f"ghcr.io/{repository}")
    assert matches(pattern, f"ghcr.io/{repository}@{DIGEST}")


@pytest.mark.parametrize(
    ("image", "is_own"),
    [
        ("toolcrew-sandbox:dev", True),
        ("toolcrew-sandbox-python:dev", True),
        ("newcomer-mcp:dev", False),
        ("ghcr.io/team/toolcrew-sandbox:1", False),
    ],
)
def test_the_advice_for_a_missing_image_fits_the_image(image: str, is_own: bool) -> None:
    assert ("scripts/build-image" in advise_missing(image)) is is_own
