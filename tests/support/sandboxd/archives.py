"""Build tar archives for tests."""

import io
import tarfile


def build_tar(*entries: tuple[str, bytes | str | int], mode: str = "w") -> bytes:
    """Return a tar of names with content. A str is a link's target; a number is the size of a file of zeros."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in entries:
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                archive.addfile(member)
            else:
                data = content if isinstance(content, bytes) else bytes(content)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()
