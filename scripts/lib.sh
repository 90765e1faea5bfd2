# Library of the sh scripts in this folder; they source it. Provides $ROOT, fail, is_root, apt_install and the phases.
# shellcheck shell=sh

ROOT=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
LOG=
PHASE_PID=

# fail CODE SENTENCE: ends the script; 69 is "a service is unavailable" (sysexits.h).
fail() {
    code=$1
    shift
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit "$code"
}

is_root() {
    [ "$(id -u)" -eq 0 ]
}

# apt_install PACKAGE...: fails if the system is not Debian-like, the user is not root, or apt fails.
apt_install() {
    is_root && command -v apt-get >/dev/null 2>&1 || return 1
    phase "installing $*" sh -c '
        export DEBIAN_FRONTEND=noninteractive
        apt-get update
        exec apt-get install -y --no-install-recommends "$@"' sh "$@"
}

# open_log: sends the output of the phases to a temporary file. The file is removed at the end, unless phase_failed
# keeps it.
open_log() {
    LOG=$(mktemp "${TMPDIR:-/tmp}/toolcrew-${0##*/}.XXXXXX")
    trap 'close_log' EXIT
    trap 'stop_phase; exit 129' HUP
    trap 'stop_phase; exit 130' INT
    trap 'stop_phase; exit 143' TERM
}

close_log() {
    if [ -n "$LOG" ]; then rm -f "$LOG"; fi
}

# Each phase has its own process group, so that no process of a phase outlives an interrupted script.
stop_phase() {
    if [ -n "$PHASE_PID" ]; then
        kill -s TERM -- "-$PHASE_PID" 2>/dev/null || true
        wait "$PHASE_PID" 2>/dev/null || true
    fi
}

on_terminal() {
    [ -t 1 ] && [ "${TERM:-dumb}" != dumb ]
}

# phase TITLE COMMAND...: runs COMMAND quietly and returns its exit status. A terminal shows one line of progress.
# That line has a bar if PHASE_DONE (a grep pattern for a finished piece) and PHASE_TOTAL (the number of pieces) are
# set.
phase() {
    phase_title=$1
    shift
    : >"$LOG"
    phase_began=$(date +%s)
    phase_columns=80
    if on_terminal; then
        phase_columns=$(stty size <&1 2>/dev/null | cut -d' ' -f2)
        [ "${phase_columns:-0}" -gt 0 ] || phase_columns=80
    else
        printf '%s\n' "$phase_title"
    fi
    setsid "$@" </dev/null >>"$LOG" 2>&1 &
    PHASE_PID=$!
    while on_terminal && kill -0 "$PHASE_PID" 2>/dev/null; do
        phase_line="$phase_title  $(phase_bar)$(($(date +%s) - phase_began)) s  $(phase_news)"
        printf '\r\033[K%s' "$(printf '%s' "$phase_line" | cut -c "1-$((phase_columns - 1))")"
        sleep 0.25
    done
    phase_status=0
    wait "$PHASE_PID" || phase_status=$?
    PHASE_PID=
    PHASE_DONE=
    PHASE_TOTAL=0
    if on_terminal; then
        printf '\r\033[K'
        if [ "$phase_status" -eq 0 ]; then printf '%s  %s s\n' "$phase_title" "$(($(date +%s) - phase_began))"; fi
    fi
    return "$phase_status"
}

phase_bar() {
    [ -n "${PHASE_DONE:-}" ] && [ "${PHASE_TOTAL:-0}" -gt 0 ] || return 0
    phase_count=$(grep -c "$PHASE_DONE" "$LOG" || true)
    [ "$phase_count" -le "$PHASE_TOTAL" ] || phase_count=$PHASE_TOTAL
    phase_width=$((phase_count * 20 / PHASE_TOTAL))
    printf '[%.*s%.*s] %s/%s  ' "$phase_width" '####################' "$((20 - phase_width))" '--------------------' \
        "$phase_count" "$PHASE_TOTAL"
}

# Print the last message of the command. Convert pip's raw progress ("Progress 1048576 of 2097152") to megabytes.
phase_news() {
    phase_last=$(tail -n 9 "$LOG" | grep -v '^WARNING\|^DEPRECATION\|^ *$' | tail -n 1 | tr -d '\r\033' | sed 's/^ *//')
    case $phase_last in
        "Progress "*" of "*)
            phase_bytes=${phase_last#Progress }
            printf '%s of %s MB' "$((${phase_bytes%% *} / 1000000))" "$((${phase_bytes##* } / 1000000))"
            ;;
        *) printf '%s' "$phase_last" ;;
    esac
}

# phase_failed CODE SENTENCE: shows the end of the log, keeps the log, ends the script.
phase_failed() {
    phase_code=$1
    shift
    tail -n 20 "$LOG" >&2
    kept=$LOG
    LOG=
    fail "$phase_code" "$* (whole log: $kept)"
}
