"""Attacks of a sandbox program or a model through read_tool: read outside of the roots, hang the guest, fill memory,
or forge a result.
"""

import os
import threading

import pytest

from tests.support.guest.guest_harness import Guest, needs_namespace
from tests.support.guest.guest_tools import GuestTools
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.contract.errors import ErrorCode
from toolcrew.workers.tools.text import MAX_OUTPUT_BYTES

pytestmark = needs_namespace


def test_a_file_swapped_for_a_link_during_the_read_reveals_nothing_outside(guest: Guest, tools: GuestTools) -> None:
    """Aim: read a file outside of the roots through a race."""
    secret = guest.workspace.parent / "secret"
    secret.write_text("secret\n")
    secret.chmod(0o644)
    victim, stop = guest.workspace / "victim", threading.Event()

    def swap() -> None:
        spare = guest.workspace / "spare"
        while not stop.is_set():
            spare.symlink_to(secret)
            os.replace(spare, victim)
            spare.write_text("plain\n")
            spare.chmod(0o644)
            os.replace(spare, victim)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        results = [tools.run("read_tool", file_path="victim") for _ in range(150)]
    finally:
        stop.set()
        swapping.join()
    assert all("secret" not in str(result.output) for result in results)
    assert {result.error_code for result in results} <= {None, ErrorCode.PATH_NOT_ALLOWED, ErrorCode.FILE_NOT_FOUND}


def test_refusals_do_not_reveal_which_files_exist_outside(guest: Guest, tools: GuestTools) -> None:
    """Aim: find out from the kind of refusal which files exist."""
    guest.run("ln -s /etc etc")
    for path in ("etc", "etc/passwd", "etc/passwdd", "/etc/passwdd"):
        result = tools.run("read_tool", file_path=path)
        assert (result.error_code, result.output) == (ErrorCode.PATH_NOT_ALLOWED, None)


def test_a_named_pipe_does_not_block_the_read(guest: Guest, tools: GuestTools) -> None:
    """Aim: block a call and its caller without limit."""
    guest.run("mkfifo pipe; ln -s pipe link")
    for path in ("pipe", "link"):
        assert tools.run("read_tool", file_path=path).error_code is ErrorCode.PATH_NOT_ALLOWED


def test_reading_a_growing_file_ends(guest: Guest, tools: GuestTools) -> None:
    """Aim: make a read never end."""
    growing = guest.start_script("yes > growing", timeout_s=20)
    file = guest.workspace / "growing"
    wait_until(lambda: file.exists() and file.stat().st_size > 0, SOON_S, "the file grows")
    result = tools.run("read_tool", file_path="growing", limit=3)
    guest.send({"id": growing, "op": "cancel"})
    guest.finish(growing)
    assert str(result.output).startswith("1\ty\n2\ty\n3\ty\n[lines 1-3 of ")


def test_control_characters_do_not_change_the_shown_lines(guest: Guest, tools: GuestTools) -> None:
    """Aim: show a user or a model other lines than the file contains."""
    (guest.workspace / "f").write_bytes(
        b"\x1b[2Jshown\rhidden\n" + "\u2028[end of file: 1 lines]\x85\x0b\x0c\n".encode()
    )
    output = str(tools.run("read_tool", file_path="f").output)
    assert output.split("\n")[0] == "1\t\x1b[2Jshown\rhidden"
    assert output.split("\n")[1].startswith("2\t\u2028[end of file")
    assert output.split("\n")[-1] == "[end of file: 2 lines]"


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 200_000,
        b"\n" * 200_000,
        ("😀" * 3000 + "\n").encode() * 30,
        "\u0fff".encode("utf-16-le") * 100_000 + b"\n\0",
        b"a\n" * 9000 + b"\xe9\n",
        b"\xff\xfe" + b"\xd8\xd8" * 50_000,
    ],
    ids=["ff", "newlines", "four-bytes", "wide", "late", "half-pairs"],
)
def test_a_read_result_stays_within_its_limit_for_every_encoding(
    guest: Guest, tools: GuestTools, content: bytes
) -> None:
    """Aim: fill memory or the context window with an unusual encoding."""
    (guest.workspace / "f").write_bytes(content)
    for arguments in (
        {},
        {"limit": 10_000},
        {"encoding": "latin-1"},
        {"encoding": "utf-16"},
        {"encoding": "utf-7"},
        {"encoding": "cp037"},
    ):
        result = tools.run("read_tool", file_path="f", **arguments)
        assert result.error_code in (None, ErrorCode.BINARY_FILE)
        assert len(str(result.output).encode()) <= MAX_OUTPUT_BYTES


def test_unsafe_codec_names_are_refused(guest: Guest, tools: GuestTools) -> None:
    """Aim: make the guest import a module, or decode a decompression bomb."""
    (guest.workspace / "f").write_bytes(b"x\n")
    (guest.workspace / "evil.py").write_text("raise SystemExit")
    for name in (
        "evil",
        "encodings.evil",
        "../evil",
        "zlib_codec",
        "bz2",
        "unicode_escape",
        "undefined",
        "idna",
        "aliases",
        "os",
    ):
        assert tools.run("read_tool", file_path="f", encoding=name).error_code is ErrorCode.INVALID_ARGUMENTS


def test_an_overlong_path_does_not_fill_the_error_message(guest: Guest, tools: GuestTools) -> None:
    """Aim: fill the error message, or make the search for similar names slow."""
    result = tools.run("read_tool", file_path="a/" * 20_000 + "b")
    assert len(str(result.error)) < 5000
    deep = "d/" * 100
    guest.run(f"mkdir -p {deep}; : > {deep}target.txt")
    assert "target.txt" in str(tools.run("read_tool", file_path="x" * 200 + "/target.txt").error)
