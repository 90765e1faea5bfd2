"""Handle the file request that writes raw bytes. A new version replaces the old one completely, or nothing changes."""

from __future__ import annotations

import os
import stat

from guest.confinement import DirectoryEntry, find_entry
from guest.failures import FILE_EXISTS, RequestFailure, describe_os_error
from guest.files.file_states import MAX_BYTES, FileState
from guest.files.versions import BodyContent, OldFile, Version, open_old

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.files.requests import WriteFileRequest
    from guest.request_context import RequestContext


def write_file(request: WriteFileRequest, context: RequestContext) -> dict[str, object]:
    """Write the body to a file. Raises RequestFailure: the old content is then intact and no temporary file remains."""
    entry = find_entry(request.path, context.paths, make_parents=True, is_exact=True)
    try:
        return _write(str(request.mode), entry, context)
    except OSError as error:
        raise describe_os_error(error, entry.shown) from None
    finally:
        entry.close()


def _write(mode: str, entry: DirectoryEntry, context: RequestContext) -> dict[str, object]:
    content = BodyContent(context.body)
    version = Version(entry, content, context.watch)
    old = open_old(entry, os.O_WRONLY | (os.O_APPEND if mode == "append" else 0))
    if mode == "create":
        if old is not None:
            raise RequestFailure(FILE_EXISTS, f"{entry.shown}: exists already")
        status = version.create()
    elif mode == "append" and old is not None:
        status = version.append(old)
    else:
        status = version.replace(old)
    _record(FileState(entry, context.paths), old if mode == "append" else None, content, status)
    return {"created": old is None, "size": status.st_size, "mode_bits": stat.S_IMODE(status.st_mode)}


def _record(state: FileState, appended: OldFile | None, content: BodyContent, status: os.stat_result) -> None:
    """Record the content that the session wrote.

    After an append to a file that the session had not read, record nothing: it still does not know the file's content.
    """
    if appended is None and content.size <= MAX_BYTES:
        state.record(tuple(content.blocks()), status)
    elif state.is_known:
        # Another process may have changed the file before the append. Delete the record, so that a later overwrite is
        # not rejected because of this session's own append.
        state.forget()
