"""Untrusted tar archives: archives of tar and Python are read unchanged, hostile archives are refused in linear time."""

import io
import subprocess
import tarfile
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcrew.contract.tar_archives import TarEntry, TarRefused, read_tar

NAMES = st.lists(
    st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=120),
    min_size=1,
    max_size=4,
)
FORMATS = [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]


def read(data: bytes, max_entries: int = 1000) -> list[TarEntry]:
    return list(read_tar(io.BytesIO(data), max_entries))


def header(name: str, kind: bytes, data: bytes = b"", size: int | None = None) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.type, entry.size = kind, len(data) if size is None else size
    return entry.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def pax(*records: tuple[str, str]) -> bytes:
    lines = b""
    for key, value in records:
        rest = f" {key}={value}\n".encode("utf-8", "surrogateescape")
        count = len(rest) + 1
        while count != len(str(count)) + len(rest):
            count = len(str(count)) + len(rest)
        lines += str(count).encode() + rest
    return lines


@given(st.lists(st.tuples(NAMES, st.binary(max_size=2000), st.booleans()), max_size=8), st.sampled_from(FORMATS))
def test_archives_written_by_python_are_read(files: list[tuple[list[str], bytes, bool]], form: int) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for parts, data, is_executable in files:
            entry = tarfile.TarInfo("/".join(parts))
            entry.size, entry.mode = len(data), 0o755 if is_executable else 0o644
            archive.addfile(entry, io.BytesIO(data))
    members = [(member.name, member.read(buffer), member.is_executable) for member in read_tar(buffer, 100)]
    assert members == [("/".join(parts), data, is_executable) for parts, data, is_executable in files]


@pytest.mark.parametrize("form", ["gnu", "pax", "ustar"])
def test_archives_written_by_tar_are_read(tmp_path: Path, form: str) -> None:
    folder = tmp_path / ("deep" * 20)
    folder.mkdir()
    # The order of a folder decides which of two hard links is the file. The form ustar stores targets of at most 100.
    (folder / "file").write_bytes(b"x" * 1000)
    (folder / "hard").hardlink_to(folder / "file")
    (folder / ("n" * 90)).touch()
    (folder / "link").symlink_to("file")
    done = subprocess.run(
        ["tar", "-c", f"--format={form}", "-C", str(tmp_path), "."], capture_output=True, check=True, timeout=20
    )
    kinds = {member.name.rpartition("/")[2]: member for member in read(done.stdout)}
    assert {member.kind for member in kinds.values()} == {"folder", "file", "hardlink", "symlink"}
    assert (kinds["link"].link, sum(member.size for member in kinds.values())) == ("file", 1000)


HOSTILE = {
    "a global header": header("g", b"g", pax(("comment", "x"))),
    "a sparse entry": header("s", b"S", size=10),
    "a sparse entry of PAX": header("x", b"x", pax(("GNU.sparse.size", "60000000"))) + header("f", b"0"),
    "chained PAX headers": header("x", b"x", pax(("comment", "x"))) * 5000,
    "chained long names": header("L", b"L", b"n") * 5000,
    "a size beyond the archive": header("f", b"0", size=10_000_000),
    "a binary size": header("f", b"0", size=2**62),
    "no end": header("f", b"0", b"x"),
    "a cut header": header("f", b"0", b"x")[:300],
    "a wrong checksum": b"x" + header("f", b"0")[1:],
    "a record of PAX that does not end": header("x", b"x", b"99999 path=x"),
    "a record of PAX of length 0": header("x", b"x", b"0 path=x\n" * 100),
    "a size of PAX that is no number": header("x", b"x", pax(("size", "1" * 5000))) + header("f", b"0"),
    "a large extended header": header("x", b"x", b"1" * 100_000),
}


def test_many_short_pax_records_take_linear_time() -> None:
    data = header("x", b"x", b"6 a=b\n" * 10_000) + header("f", b"0")
    began = time.process_time()
    assert len(read(data * 100 + bytes(1024))) == 100
    assert time.process_time() - began < 4


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tar_archives_are_refused(name: str) -> None:
    with pytest.raises(TarRefused):
        read(HOSTILE[name] + (b"" if name == "no end" else bytes(1024)))


def test_reading_takes_linear_time_and_memory() -> None:
    """Names of digits and many extended headers: what other readers need quadratic time for."""
    archive = header("x", b"x", pax(("path", "1" * 4000), ("comment", "1" * 50_000))) + header("f", b"0")
    data = archive * 250 + bytes(1024)
    tracemalloc.start()
    began = time.process_time()
    assert len(read(data)) == 250
    assert time.process_time() - began < 2
    assert tracemalloc.get_traced_memory()[1] < 2 * len(data)
    tracemalloc.stop()


@given(st.binary(max_size=3000), st.integers(0, 1500))
def test_any_bytes_are_a_tar_archive_or_refused(noise: bytes, at: int) -> None:
    whole = header("./a", b"0", b"content") + header("./b", b"0", b"more") + bytes(1024)
    for data in (noise, whole[:at] + noise + whole[at + len(noise) :]):
        try:
            assert all(member.offset + member.size <= len(data) for member in read(data))
        except TarRefused:
            continue
