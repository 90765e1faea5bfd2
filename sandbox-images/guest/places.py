"""Where a sandbox keeps its files, and the environment its programs start with."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


class Places:
    """The directories file requests are confined to. The first is where relative paths start."""

    __slots__ = ("roots", "use_openat2")

    def __init__(self, roots: tuple[bytes, ...] = (b"/workspace", b"/tmp"), use_openat2: bool = True) -> None:
        self.roots = roots
        self.use_openat2 = use_openat2

    @property
    def workspace(self) -> bytes:
        return self.roots[0]


ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "DEBIAN_FRONTEND": "noninteractive",
    "NO_COLOR": "1",
    "PYTHONUNBUFFERED": "1",
    "PIP_PROGRESS_BAR": "off",
}
