"""A folder of the user's as a tar archive, and an archive from a sandbox back into a folder. The second is hostile."""

import io
import tarfile
from pathlib import Path

from contract.errors import ConfigError, ErrorCode, ToolFailure
from orchestrator.blobs import MAX_BLOB_BYTES


def pack_folder(folder: Path) -> bytes:
    """The folder's content as an uncompressed tar. Raises ConfigError when it is no folder or larger than a blob."""
    if not folder.is_dir():
        raise ConfigError(f"the workspace {folder} is not a folder: give an existing one")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(folder.rglob("*")):
            archive.add(path, arcname=str(path.relative_to(folder)), recursive=False, filter=_plain_entry)
            if buffer.tell() > MAX_BLOB_BYTES:
                raise ConfigError(f"the workspace {folder} is larger than {MAX_BLOB_BYTES} bytes: give a smaller folder")
    return buffer.getvalue()


def unpack_archive(data: bytes, folder: Path) -> None:
    """Unpack into `folder`, which is made. Entries that lead out, devices and special files are refused: ToolFailure(PATH_NOT_ALLOWED)."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            archive.extractall(folder, filter="data")
    except tarfile.FilterError as error:
        raise ToolFailure(ErrorCode.PATH_NOT_ALLOWED, f"the sandbox's folder holds what must not be unpacked here: {error}") from error
    except (tarfile.TarError, OSError) as error:
        raise ToolFailure(ErrorCode.INTERNAL, f"the archive from the sandbox cannot be unpacked: {error}") from error


def _plain_entry(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Files, folders and links as they are; sockets, pipes and devices are left out. The owner is the sandbox's user."""
    if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
        return None
    entry.uid = entry.gid = 1000
    entry.uname = entry.gname = ""
    return entry
