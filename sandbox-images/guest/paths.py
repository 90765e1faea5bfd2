"""The folders of a sandbox, the environment of its programs, and the folder of the guest's own programs."""

from __future__ import annotations

import os

from guest.kernel import can_trace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


_LEAK_OPTIONS = "LSAN_OPTIONS"
_MAX_SEARCH_THREADS = 12
TOOLKIT = b"/opt/toolcrew/bin"
"""Folder of the guest's own programs. They run in any image, and the session cannot replace them."""


PASSED = "TOOLCREW_IMAGE_"
"""Prefix of variables of the image for programs only: PASSED_PREFIX in sandboxd's hardening.py."""
_FOR_PID_1 = ("LD_", "LC_ALL", "GCONV_PATH", "GETCONF_DIR", "GLIBC_TUNABLES", "LOCPATH", "NLSPATH")
"""Beginnings of the names of variables that sandboxd has set or emptied for PID 1."""
# Each bash would read these at its start: before it reads its script, it would change its options, replace builtins, or
# run nothing.
_OF_BASH = ("SHELLOPTS", "BASHOPTS", "BASH_FUNC_")


KERNEL_FOLDERS = (b"/proc", b"/sys", b"/dev")
"""Folders with files of the kernel and not of the image. Reading some of these files never ends."""


class GuestPaths:
    """The folders that file requests may use: `roots` for reading and writing, `output` for reading only. The root b""
    is the whole file system except KERNEL_FOLDERS: root of the sandbox may use all files.

    Relative paths start at the session's folder, `workspace`. `output` holds output that is too long for a result.
    `state`, a folder below `output`, has the guest's data about the session; searches do not show it. `environment`:
    environment variables of every program. `ripgrep`: the program and its first arguments for a search.
    """

    __slots__ = (
        "environment",
        "output",
        "readable",
        "ripgrep",
        "roots",
        "state",
        "use_openat2",
        "workspace",
    )

    def __init__(
        self,
        roots: tuple[bytes, ...] = (b"/workspace", b"/tmp", b"/home/sandbox"),
        output: bytes = b"/output",
        use_openat2: bool = True,
        ripgrep: bytes = TOOLKIT + b"/rg",
        has_all_files: bool = False,
        cpus: float = 1.0,
    ) -> None:
        everything = (b"",) if has_all_files else ()
        self.roots = (*roots, *everything)
        self.workspace = roots[0]
        self.output = output
        self.state = output + b"/.state"
        self.readable = (*roots, output, *everything)
        self.use_openat2 = use_openat2
        # Limit the threads: with more threads than the sandbox has CPUs, ripgrep needs 1.4 times the processor time.
        threads = max(1, min(int(cpus), len(os.sched_getaffinity(0)), _MAX_SEARCH_THREADS))
        self.ripgrep = (ripgrep, b"--threads=%d" % threads)
        unset = (_LEAK_OPTIONS,) if can_trace() else ()
        self.environment: Mapping[str, str] = {name: value for name, value in ENVIRONMENT.items() if name not in unset}

    def with_all_files(self) -> GuestPaths:
        """Return the same folders, and all other files that the user of the sandbox may use."""
        return GuestPaths(self.roots, self.output, self.use_openat2, has_all_files=True)

    def absolute(self, path: bytes, folder: bytes) -> bytes:
        """Return a path as an absolute one. Relative paths start at `folder`. As in the shell, `~` is the home. Models
        also write a `file:` URL, and line breaks around a path.
        """
        path = path.strip(b"\r\n")
        if path == b"~" or path.startswith(b"~/"):
            path = os.fsencode(self.environment["HOME"]) + path[1:]
        elif path.startswith(b"file:///"):
            path = path.removeprefix(b"file://")
        return os.path.join(folder, path)

    def add_variables(self, variables: Mapping[str, str]) -> None:
        """Add environment variables of the session. They replace earlier ones."""
        self.environment = {**self.environment, **variables}

    def add_image_variables(self, variables: Mapping[str, str]) -> None:
        """Add the environment variables with which PID 1 has started: those of the image, and those of sandboxd."""
        own = {name: value for name, value in variables.items() if not _is_any(name, (*_FOR_PID_1, PASSED))}
        if library_path := variables.get("LD_LIBRARY_PATH"):
            own["LD_LIBRARY_PATH"] = library_path
        passed = {name.removeprefix(PASSED): value for name, value in variables.items() if name.startswith(PASSED)}
        self.add_variables({name: value for name, value in {**passed, **own}.items() if not _is_any(name, _OF_BASH)})

    def job_log(self, job: str) -> str:
        """Return the path of the log of a job."""
        return f"{self.output.decode()}/jobs/{job}.log"

    def offer_proxy(self, port: int) -> None:
        """Set the proxy variables of programs. Programs differ in the variable names that they read."""
        proxy = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), f"http://127.0.0.1:{port}")
        own = dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1")
        self.environment = {**self.environment, **proxy, **own}


ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/home/sandbox",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "SYSTEMD_PAGER": "cat",
    "GIT_EDITOR": "true",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_CONFIG_SYSTEM": "/opt/toolcrew/etc/gitconfig",
    "DEBIAN_FRONTEND": "noninteractive",
    "NO_COLOR": "1",
    # The leak check of AddressSanitizer needs ptrace, and fails every program where ptrace is denied. This variable
    # does not replace ASAN_OPTIONS, which projects set for themselves.
    _LEAK_OPTIONS: "detect_leaks=0",
    "PYTHONUNBUFFERED": "1",
    "PIP_PROGRESS_BAR": "off",
    "PIP_NO_INPUT": "1",
}


def _is_any(name: str, beginnings: tuple[str, ...]) -> bool:
    """Return whether the name is one of these, or begins with one that ends with "_"."""
    return any(name == beginning or (beginning[-1] == "_" and name.startswith(beginning)) for beginning in beginnings)
