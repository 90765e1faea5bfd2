"""Programs that toolcrew itself runs in a sandbox: checkpoints, forks, lists and copies of files.

They are programs of the toolkit, and their environment has nothing of the image or session. So they work in every
image: in one without bash or tar, with another tar, or with variables such as BASH_ENV and TAR_OPTIONS.
"""

from typing import Final

TOOLKIT: Final = "/opt/toolcrew"
_PROGRAMS: Final = f"{TOOLKIT}/bin"
_VARIABLES: Final = (
    # git and unzip are programs of the image.
    f"PATH={_PROGRAMS}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL=C",
    f"GIT_CONFIG_SYSTEM={TOOLKIT}/etc/gitconfig",
    # Without these two, bash asks the user database, which may load libraries of the image.
    "HOME=/nonexistent",
    f"SHELL={_PROGRAMS}/bash",
)


def own_program(*argv: str) -> list[str]:
    """Return the arguments that run a program of toolcrew, for example `own_program("bash", "-c", script)`."""
    return [f"{_PROGRAMS}/env", "-i", *_VARIABLES, *argv]


OPEN_CLOSED: Final = """
# Restore the modes from the deepest folder upwards.
put_back() {
    for ((at = ${#closed[@]} - 1; at >= 0; at--)); do chmod "${closed[at]%% *}" "${closed[at]#* }"; done
}
open_closed() {
    trap put_back EXIT
    mapfile -d '' -t closed < <(find "$@" -xdev -uid "$UID" \\( -type d ! -perm -500 -printf '%m %p\\0' \\
        -exec chmod u+rx {} \\; \\) -o \\( -type f ! -perm -400 -printf '%m %p\\0' -exec chmod u+r {} + \\))
}
"""
"""Bash text that makes files readable, for a while, whose mode forbids even their own user to read them: a mode that a
command has set must hide no files from a copy. Defines `open_closed FOLDER...`, which opens what is below the folders
until the shell exits. It sets the EXIT trap.
"""
