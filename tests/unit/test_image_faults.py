"""Messages of an engine or of a starting container, and the resulting explanations of the image's fault."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import SandboxUnavailable
from workers.sandboxd.runtime.image_faults import explain_start_failure, explain_unfit, explained

RUNC = "failed to create shim task: OCI runtime create failed: runc create failed: unable to start container process: "
# Original messages of engines, kernels and the guest.
WORDS = {
    f'{RUNC}exec: "python3": executable file not found in $PATH: unknown': "it has no python3",
    f'{RUNC}exec: "/usr/bin/python3": stat /usr/bin/python3: no such file or directory: unknown': "it has no python3",
    "exec /usr/bin/python3: exec format error": "for another processor",
    "standard_init_linux.go:228: exec user process caused: exec format error": "for another processor",
    "exec /usr/bin/python3: no such file or directory": "loader",
    "exec /usr/bin/python3: permission denied": "uid 1000",
    f'{RUNC}exec: "/usr/bin/python3": permission denied: unknown': "uid 1000",
    "toolcrew guest: this image's python3 is 3.6; Python 3.9 or later is needed\n": (
        "its python3 is 3.6; use an image with 3.9 or later"
    ),
    "toolcrew guest: this image's python3 lacks a part of the standard library: No module named 'ctypes'\n": (
        "no module 'ctypes'"
    ),
    "toolcrew guest: this image's python3 lacks a part of the standard library: cannot import name 'x'\n": (
        "lacks a part of the standard library"
    ),
    "python3: error while loading shared libraries: libpython3.9.so.1.0: cannot open shared object file": (
        "libpython3.9.so.1.0"
    ),
    "/usr/bin/python3: can't find '__main__' module in '/opt/toolcrew'": "no guest in /opt/toolcrew",
    "Fatal Python error: init_fs_encoding: failed to get the Python codec of the filesystem encoding": "does not start",
    "toolcrew guest: unknown option --life\n": "another version",
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


@pytest.mark.parametrize(("words", "says"), WORDS.items(), ids=range(len(WORDS)))
def test_a_fault_of_the_image_is_told_with_its_name(words: str, says: str) -> None:
    sentence = explain_start_failure(words, "acme/tools:1")
    assert sentence is not None
    assert sentence.startswith("image acme/tools:1 cannot be a sandbox: ")
    assert says in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    "words",
    [
        "",
        "No such container: 1234",
        "the engine does not answer",
        "OCI runtime create failed: cannot allocate memory: unknown",
        f'{RUNC}error mounting "/srv/mount" to rootfs at "/workspace": no such file or directory: unknown',
    ],
)
def test_what_is_about_something_else_is_left_to_others(words: str) -> None:
    assert explain_start_failure(words, "acme/tools:1") is None


@given(st.text(max_size=2000))
def test_no_words_of_a_container_get_far_into_the_sentence(words: str) -> None:
    for sentence in (
        explain_start_failure(words, "i"),
        explain_start_failure(f"toolcrew guest: this image's python3 is 3.6;{words}", "i"),
    ):
        assert sentence is None or (len(sentence) < 300 and sentence.isprintable())


def test_an_image_that_declares_a_volume_is_unfit_and_the_volumes_are_named() -> None:
    sentence = explain_unfit({"Volumes": {"/data": {}, "/a": {}}}, "acme/tools:1")
    assert sentence is not None
    assert "image acme/tools:1 cannot be a sandbox: it declares volumes (/a, /data)" in sentence


@pytest.mark.parametrize("config", [{}, {"Volumes": None}, {"Volumes": {}, "Env": ["A=1"]}])
def test_an_image_without_volumes_is_fit(config: dict[str, object]) -> None:
    assert explain_unfit(config, "i") is None


def test_only_a_fault_of_the_image_is_put_in_other_words() -> None:
    with (
        pytest.raises(SandboxUnavailable, match="image i cannot be a sandbox: its python3 is for another processor"),
        explained("i"),
    ):
        raise SandboxUnavailable("the sandbox did not start: exec /usr/bin/python3: exec format error")
    with pytest.raises(SandboxUnavailable, match=r"^the engine is busy$"), explained("i"):
        raise SandboxUnavailable("the engine is busy")
