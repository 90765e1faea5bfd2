"""Attacks on write_text and edit_text. A full disk, a limit, a race or a forged memory of reads must neither destroy
a file nor lead outside of the roots.
"""

import json
from collections.abc import Iterator

import pytest

from tests.support.guest.guest_harness import Done, Guest, needs_namespace, running_guest

pytestmark = needs_namespace

# The last argument of the guest is its output folder; the workspace is next to that folder.
_SMALL_DISK = 'for last; do :; done; mount -t tmpfs -o size=256k,mode=777 none "${last%/output}/workspace";'


@pytest.fixture(scope="module")
def small_disk() -> Iterator[Guest]:
    with running_guest(_SMALL_DISK) as guest:
        yield guest


@pytest.fixture(scope="module")
def guest() -> Iterator[Guest]:
    with running_guest() as running:
        yield running


def write(guest: Guest, path: str, text: str, mode: str = "overwrite", timeout_s: float = 60) -> Done:
    return guest.request("write_text", text.encode(), path=path, mode=mode, max_bytes=8192, timeout_s=timeout_s)


def edit(guest: Guest, path: str, old: str, new: str, timeout_s: float = 60, **fields: object) -> Done:
    body = json.dumps([{"old_string": old, "new_string": new, **fields}]).encode()
    return guest.request("edit_text", body, path=path, max_bytes=8192, timeout_s=timeout_s)


def shell(guest: Guest, script: str) -> str:
    return guest.run(script).bytes_of("stdout").decode()


@pytest.mark.parametrize("place", ["f", "hard", "locked/f"])
def test_a_disk_that_fills_during_a_write_destroys_no_old_content(small_disk: Guest, place: str) -> None:
    """Aim: destroy the old content by filling the disk at the right moment."""
    shell(
        small_disk,
        "chmod -R u+rwx .; rm -rf *; mkdir locked; echo old | tee f hard locked/f; ln hard hard2; chmod 555 locked",
    )
    for mode in ("overwrite", "append"):
        done = write(small_disk, place, "x" * 300_000, mode)
        assert (done.code, "bytes are free" in done["error"]["message"]) == ("NO_SPACE", True)
    assert edit(small_disk, place, "old", "x" * 300_000).code == "NO_SPACE"
    assert shell(small_disk, f"cat {place}; find . -type f | sort") == "old\n./f\n./hard\n./hard2\n./locked/f\n"
    assert write(small_disk, "fresh", "x" * 300_000, "create").code == "NO_SPACE"
    assert shell(small_disk, "ls -A | grep -c fresh") == "0\n"


def test_overwriting_a_sparse_file_on_a_full_disk_destroys_no_old_content(small_disk: Guest) -> None:
    """Aim: destroy the old content of a sparse file, whose blocks are not allocated yet."""
    shell(small_disk, "chmod -R u+rwx .; rm -rf *; echo precious > f; truncate -s 1M f; ln f g")
    assert write(small_disk, "f", "x" * 900_000).code == "NO_SPACE"
    assert shell(small_disk, "head -n 1 g") == "precious\n"


def test_a_file_size_limit_destroys_no_old_content() -> None:
    """Aim: destroy the old content through the limit of one file's size."""
    with running_guest("ulimit -f 8;") as limited:
        shell(limited, "echo old > f; echo old > a; ln a b")
        for path in ("f", "a", "new"):
            assert write(limited, path, "x" * 100_000).code == "NO_SPACE"
        assert edit(limited, "b", "old", "x" * 100_000).code == "NO_SPACE"
        assert shell(limited, "cat f b; ls -A") == "old\nold\na\nb\nf\n"


def test_a_folder_swapped_for_a_link_during_a_write_leads_nowhere_outside(guest: Guest) -> None:
    """Aim: make a write reach a path outside of the roots."""
    outside = guest.output / "outside"
    guest.run(f"mkdir -p {outside} d; ln -s {outside} evil")
    racer = guest.start_script(
        "echo on > started; while :; do mv -T d e; mv -T evil d; mv -T d evil; mv -T e d; done", timeout_s=30
    )
    guest.wait_for_file("started")
    codes = {write(guest, "d/f", f"text {number}\n").code for number in range(60)}
    guest.send({"id": racer, "op": "cancel"})
    guest.finish(racer)
    assert codes <= {None, "PATH_NOT_ALLOWED", "FILE_NOT_FOUND", "NOT_A_DIRECTORY", "STALE_FILE", "FILE_EXISTS"}
    assert list(outside.iterdir()) == []
    assert not [path for path in guest.workspace.rglob(".toolcrew-*")]


def test_an_edit_does_not_overwrite_concurrent_changes(guest: Guest) -> None:
    """Aim: make an edit undo a write that another program made a moment before."""
    guest.run("seq 1 2000 > counted; echo MARK >> counted")
    adder = guest.start_script(
        "echo on > started2; for i in $(seq 1 150); do /bin/true; echo added $i >> counted; done",
        timeout_s=30,
        capture={"stdout": 0},
    )
    guest.wait_for_file("started2")
    for _ in range(20):
        edit(guest, "counted", "MARK", "KRAM")
        edit(guest, "counted", "KRAM", "MARK")
    guest.finish(adder)
    # An append between the last check and the rename goes to the old file: 1 of 150 on a busy machine. Edits without
    # the check would lose about 30. The shell itself opens and appends, because a separate program would hold the old
    # file while it starts.
    assert int(shell(guest, "grep -c added counted")) > 135


@pytest.mark.parametrize(
    "harm",
    [
        "rm -rf $S",
        "rm -rf $S/files; ln -s /workspace $S/files",
        "rm -rf $S; ln -s / $S",
        "rm -rf $S; touch $S",
        "for f in $S/files/*; do rm $f; mkfifo $f; done",
        "for f in $S/files/*; do echo forged > $f; done",
        "for f in $S/files/*; do rm $f; ln -s /etc/passwd $f; done",
        "for f in $S/files/*; do rm $f; mkdir $f; done",
        "chmod 0 $S/files",
        "chmod 555 $S/files",
    ],
)
def test_a_damaged_read_record_fails_at_most_one_write(guest: Guest, harm: str) -> None:
    """Aim: make the session's files unwritable, or block a request without limit."""
    state = f"{guest.output}/.state"
    guest.run(f"rm -f {state}; chmod -R u+rwx {state}; rm -rf {state}")
    write(guest, "kept", "one\n")
    guest.run(f"S={state}; echo two > kept; {harm}")
    codes = [write(guest, "kept", f"three {number}\n").code for number in range(3)]
    assert codes[1:] == [None, None]
    assert codes[0] in (None, "STALE_FILE")
    guest.run(f"rm -f {state}; chmod -R u+rwx {state}; rm -rf {state}")


def test_a_full_state_folder_fails_no_later_write(guest: Guest) -> None:
    """Aim: make writes fail by filling the memory of earlier reads."""
    with running_guest('for last; do :; done; mount -t tmpfs -o size=64k,mode=777 none "$last";') as full:
        write(full, "f", "one\n")
        full.run(f"head -c 100000 /dev/zero > {full.output}/filler; echo two > f")
        assert write(full, "f", "x" * 70_000).code in (None, "STALE_FILE")
        assert write(full, "f", "three\n").code is None
        assert write(full, "f", "four\n").code is None


@pytest.mark.parametrize("tail", ["", "\r\nx\n"])
def test_a_replacement_that_multiplies_the_file_size_is_refused(guest: Guest, tail: str) -> None:
    """Aim: create terabytes from a small file and a small call."""
    write(guest, "seed", "a\n" * 100_000 + tail)
    bomb = edit(guest, "seed", "a\n", "b" * 100_000 + "\n", replace_all=True)
    assert (bomb.code, "the edits would make it" in bomb["error"]["message"]) == ("FILE_TOO_LARGE", True)
    doubling = [{"old_string": "a", "new_string": "aa", "replace_all": True}] * 60
    assert (
        guest.request("edit_text", json.dumps(doubling).encode(), path="seed", max_bytes=8192, timeout_s=60).code
        == "FILE_TOO_LARGE"
    )
    assert (guest.workspace / "seed").stat().st_size == 200_000 + len(tail)


def test_concurrent_edits_of_one_file_are_all_applied(guest: Guest) -> None:
    """Aim: let two calls read the same version, so that the second call undoes the first."""
    write(guest, "shared", "".join(f"<{number}>\n" for number in range(30)))
    calls = [
        guest.start(
            "edit_text",
            json.dumps([{"old_string": f"<{number}>", "new_string": f"[{number}]"}]).encode(),
            path="shared",
            max_bytes=8192,
            timeout_s=20,
        )
        for number in range(30)
    ]
    assert [guest.finish(call).code for call in calls] == [None] * 30
    assert (guest.workspace / "shared").read_text() == "".join(f"[{number}]\n" for number in range(30))


@pytest.mark.parametrize(
    ("body", "old"),
    [
        (b"a" * 4_000_000, "a" * 100_000 + "b"),
        (b"a\n" * 1_000_000 + b"a\r\n", "a\n" * 50_000 + "b"),
        (b" " * 4_000_000, "x" + " " * 1000 + "y"),
        (b"(" * 2_000_000, "((((" * 100 + ")"),
        (b"\n" * 4_000_000, "\n\n\nx"),
    ],
)
def test_a_missing_old_string_is_reported_in_bounded_time(guest: Guest, body: bytes, old: str) -> None:
    """Aim: make the search, or the explanation of a miss, slow with a special file and old_string."""
    guest.request("write_file", body, path="slow", mode="overwrite", timeout_s=60)
    before_s = guest.processor_s()
    assert edit(guest, "slow", old, "new").code == "NO_MATCH"
    assert guest.processor_s() - before_s < 12


def test_many_matches_in_one_long_multibyte_line_are_replaced_in_time(guest: Guest) -> None:
    """Aim: make the guest check each match from the start of its line, so that a small file takes long."""
    line = "あい" * 20_000
    guest.request("write_file", line.encode("cp932"), path="line", mode="overwrite", timeout_s=60)
    before_s = guest.processor_s()
    assert edit(guest, "line", "いあ", "xy", replace_all=True, timeout_s=60)["replaced"] == 19_999
    assert guest.processor_s() - before_s < 5
    assert (guest.workspace / "line").read_text("cp932") == "あ" + "xy" * 19_999 + "い"


@pytest.mark.parametrize(
    "content", ["x = [...a, ...b];" * 60_000, "...\n" * 250_000, "// ... rest of the code ...\n" * 35_000]
)
def test_a_text_full_of_dots_is_written_in_time(guest: Guest, content: str) -> None:
    """Aim: make the search for placeholders scan a long line again for each of its dots."""
    before_s = guest.processor_s()
    assert [write(guest, "dots", content + end).code for end in ("", "x" * 200)] == [None, None]
    assert guest.processor_s() - before_s < 4
