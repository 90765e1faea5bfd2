"""Import of one file into a workspace. The file is unpacked or cloned inside the sandbox, so that a hostile archive
harms only its own sandbox.
"""

import re
import signal
from collections.abc import Mapping, Sequence

from toolcrew.contract.errors import ErrorCode, ToolFailure

TAR_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "tar": (),
    "tar.gz": ("--gzip",),
    "tar.bz2": ("--bzip2",),
    "tar.xz": ("--xz",),
}
KINDS = (*TAR_OPTIONS, "zip", "bundle")

# The script stops at the first file that does not fit. tar itself would continue to the end of the archive, which takes
# very long for a decompression bomb.
_UNTAR = """
tar -x "${@:2}" -f - -C "$1" --no-same-owner --no-same-permissions --delay-directory-restore 2>&1 >/dev/null |
while IFS= read -r line; do
    printf '%s\\n' "$line" >&2
    case $line in *'No space left'* | *'File too large'* | *'quota exceeded'* | *'Wrote only'*) kill -TERM 0 ;; esac
done
exit "${PIPESTATUS[0]}"
"""
_OUTSIDE = 65
_FILE_TOO_LARGE = 128 + signal.SIGXFSZ
"""Exit code of a program that was killed at the size limit of a file."""
_UNZIP = f"""
exec 3<&0 </dev/null
if unzip -Z1 /dev/fd/3 | grep -qaE '^/|(^|/)\\.\\.(/|$)'; then exit {_OUTSIDE}; fi
unzip -q -o /dev/fd/3 -d "$1"
status=$?
# 1: it has warned, and unpacked everything.
exit $((status == 1 ? 0 : status))
"""
_CLONE = """
set -e
exec 3<&0 </dev/null
cd -- "$1"
git clone -q /dev/fd/3 .
git rev-parse -q --verify HEAD >/dev/null || { echo 'the bundle has no HEAD' >&2; exit 1; }
git fetch -q --update-head-ok origin '+refs/heads/*:refs/heads/*'
git remote remove origin
"""
_NO_ROOM = (
    "No space left",
    "File too large",
    "Disk quota exceeded",
    "File size limit exceeded",
    "disk full",
    "quota exceeded",
    # The last block of tar that fits in part.
    "Wrote only",
)
_NOT_FOUND = 127
_MISSING = re.compile(r": (unzip|git): (?:command not found|No such file or directory)$", re.M)
"""Message of bash about a program that only the image can have."""
_LEADS_OUT = ("Removing leading", "contains '..'")


def build_import(kind: str, folder: str) -> list[str]:
    """Return the program that unpacks its standard input, a file of `kind`, into the folder. A bundle is cloned with
    all branches and without a remote; the branch of HEAD is checked out.
    """
    if kind == "zip":
        return ["bash", "-c", _UNZIP, "import", folder]
    if kind == "bundle":
        return ["bash", "-c", _CLONE, "import", folder]
    return ["bash", "-c", _UNTAR, "import", folder, *TAR_OPTIONS[kind]]


def check_import(kind: str, exit_code: int | None, error_output: str, *, timed_out: bool, timeout_s: float) -> None:
    """Raise ToolFailure unless the import is complete. `error_output`: the text on stderr."""
    if exit_code == _FILE_TOO_LARGE or (exit_code != 0 and any(marker in error_output for marker in _NO_ROOM)):
        raise ToolFailure(ErrorCode.NO_SPACE, f"the {kind} does not fit into the workspace: use a smaller one")
    if timed_out:
        raise ToolFailure(ErrorCode.TIMEOUT, f"the {kind} was not unpacked within {timeout_s:g} s: use a smaller one")
    if exit_code == _OUTSIDE or any(marker in error_output for marker in _LEADS_OUT):
        raise ToolFailure(
            ErrorCode.PATH_NOT_ALLOWED,
            f"the {kind} contains names that lead out of the workspace (absolute, or with '..'): pack it with "
            f"relative names",
        )
    missing = _MISSING.search(error_output) if exit_code == _NOT_FOUND else None
    if missing is not None:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"the image of the session has no {missing[1]}, which unpacks the {kind}: use another image, or a tar file",
        )
    if exit_code != 0:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"the {kind} cannot be unpacked ({_shorten_errors(error_output) or exit_code}): pack it again",
        )


def _shorten_errors(error_output: str) -> str:
    lines: Sequence[str] = [
        line
        for line in error_output.strip().splitlines()
        if "Exiting with failure status" not in line and "not recoverable" not in line
    ]
    return " | ".join(lines)[-500:]
