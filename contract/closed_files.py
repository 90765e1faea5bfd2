"""Bash text that makes files readable, for a while, whose mode forbids even their own user to read them.

Programs that read a whole workspace begin with this text: a mode that a command has set must hide no files from a copy.
"""

OPEN_CLOSED = """
# Restore the modes from the deepest folder upwards.
put_back() {
    for ((at = ${#closed[@]} - 1; at >= 0; at--)); do chmod "${closed[at]%% *}" "${closed[at]#* }"; done
}
open_closed() {
    trap put_back EXIT
    mapfile -d '' -t closed < <(find "$@" -xdev -user "$UID" \\( -type d ! -perm -500 -printf '%m %p\\0' \\
        -exec chmod u+rx {} \\; \\) -o \\( -type f ! -perm -400 -printf '%m %p\\0' -exec chmod u+r {} + \\))
}
"""
"""Defines `open_closed FOLDER...`: opens what is below the folders until the shell exits. It sets the EXIT trap."""
