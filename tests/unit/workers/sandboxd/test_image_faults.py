"""Messages of an engine or of a starting container, and the resulting explanations of the image's fault."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.runtime.image_faults import explain_start_failure, explain_unfit, explained

RUNC = "failed to create shim task: OCI runtime create failed: runc create failed: unable to start container process: "
# Original messages of engines.
MESSAGES = {
    (
        f'{RUNC}error during container init: error mounting "tmpfs" to rootfs at "/tmp": mount tmpfs:/tmp, data: '
        "size=64m: "
        "not a directory: unknown: "
        "Are you trying to mount a directory onto a file (or vice-versa)?"
    ): "its /tmp is not a folder",
    (
        f'{RUNC}error mounting "/srv/mount" to rootfs at "/workspace": "/x/proc" cannot be mounted because it is not '
        "of "
        "type proc"
    ): ("its /workspace is"),
    "the Docker engine refused: Cannot mkdir: /workspace is not a directory": "its /workspace is not a folder",
    "evalSymlinksInScope: too many links in /var/lib/docker/overlay2/b8d9/merged/workspace": (
        "its /workspace is not a folder"
    ),
}


@pytest.mark.parametrize(
    ("message", "expected"),
    MESSAGES.items(),
    ids=["tmp is a file", "workspace is in proc", "workspace is a file", "workspace is a link cycle"],
)
def test_start_failure_caused_by_the_image_names_the_image(message: str, expected: str) -> None:
    sentence = explain_start_failure(message, "acme/tools:1")
    assert sentence.startswith("image acme/tools:1 cannot be a sandbox: ")
    assert expected in sentence
    assert "\n" not in sentence


def test_start_failure_with_another_cause_is_not_explained() -> None:
    missing = f'{RUNC}error mounting "/srv/mount" to rootfs at "/workspace": no such file or directory: unknown'
    memory = "OCI runtime create failed: cannot allocate memory: unknown"
    for message in ("", "No such container: 1234", "the engine does not answer", memory, missing):
        assert explain_start_failure(message, "acme/tools:1") is None


@given(st.text(max_size=2000))
def test_explanation_of_a_start_failure_is_short_and_printable(message: str) -> None:
    for sentence in (
        explain_start_failure(message, "i"),
        explain_start_failure(f"evalSymlinksInScope: too many links {message}", "i"),
    ):
        assert sentence is None or (len(sentence) < 300 and sentence.isprintable())


def test_image_with_volumes_or_for_another_processor_is_unfit() -> None:
    sentence = str(explain_unfit({"Config": {"Volumes": {"/data": {}, "/a": {}}}}, "acme/tools:1"))
    assert "image acme/tools:1 cannot be a sandbox: it declares volumes (/a, /data)" in sentence
    assert "s390x" in str(explain_unfit({"Architecture": "s390x"}, "i"))
    for config in (None, {}, {"Volumes": None}, {"Volumes": {}, "Env": ["A=1"]}):
        assert explain_unfit({"Config": config}, "i") is None


def test_explained_rewrites_only_errors_caused_by_the_image() -> None:
    with (
        pytest.raises(SandboxUnavailable, match="image i cannot be a sandbox: its /workspace is not a folder"),
        explained("i"),
    ):
        raise SandboxUnavailable("the sandbox did not start: Cannot mkdir: /workspace is not a directory")
    with pytest.raises(SandboxUnavailable, match=r"^the engine is busy$"), explained("i", "sha256:0"):
        raise SandboxUnavailable("the engine is busy")


def test_an_error_names_the_image_as_the_caller_wrote_it() -> None:
    content = "sha256:" + "ab" * 32
    sentences = [
        str(explain_unfit({"Architecture": "s390x"}, content)),
        str(explain_unfit({"Config": {"Volumes": {"/a": {}}}}, content)),
        f"the engine has no image {content}: pull it",
    ]
    for sentence in sentences:
        with pytest.raises(SandboxUnavailable) as caught, explained("acme/tools:1", content):
            raise SandboxUnavailable(sentence)
        assert "acme/tools:1" in str(caught.value)
        assert "sha256" not in str(caught.value)
