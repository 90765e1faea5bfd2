"""List of the files in a session's working directory, for the first request to a small model."""

from toolcrew.contract.errors import ToolcrewError
from toolcrew.orchestrator.dialects.prompts import clean_line
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

LIMIT_S = 5.0
MAX_FILES, MAX_LINE_CHARS = 12, 160
MAX_BYTES = 3000
SHORT_LINES, CODE_LINES, SHORT_BYTES = 4, 12, 400
"""Limits of a file whose text is shown: lines, lines of a source code file, and bytes."""
_CODE = "*.py|*.sh|*.js|*.ts|*.go|*.rs|*.c|*.h|*.cpp|*.java|*.rb|*.php"

_HEADING = "Files in the working directory:"
# With the numbers of columns, because small models count them wrongly. Every step reads a bounded number of bytes: the
# directory may hold anything.
_SCRIPT = f"""
shown=0
for path in *; do
  [ -e "$path" ] || continue
  shown=$((shown + 1))
  if [ $shown -gt {MAX_FILES} ]; then echo '...'; break; fi
  if [ -d "$path" ]; then
    files=$(find "./$path" -type f | head -n 1000)
    names=$(printf '%s\\n' "$files" | sed 's,.*/,,' | sort | head -n 4 | tr '\\n' ' ')
    printf '%s/: %s files: %s\\n' "$path" "$(printf '%s' "$files" | grep -c .)" "$names"
  elif [ -f "$path" ]; then
    lines=$(head -c 10000000 "./$path" | wc -l)
    case "$path" in
      *.csv) columns=$(head -c 300 "./$path" | head -n 1 | tr ',' '\\n' | awk '{{printf "$%d=%s ", NR, $0}}')
        printf '%s: %s lines, columns: %s\\n' "$path" "$lines" "$columns" ;;
      *) printf '%s: %s lines\\n' "$path" "$lines"
        # Nothing of a longer file: a small model answers from its beginning instead of reading it.
        case "$path" in {_CODE}) most={CODE_LINES} ;; *) most={SHORT_LINES} ;; esac
        if [ $lines -le $most ] && [ $(head -c {SHORT_BYTES + 1} "./$path" | wc -c) -le {SHORT_BYTES} ]
        then head -c {SHORT_BYTES} "./$path" | sed 's/^/  /'; echo; fi ;;
    esac
  fi
done
"""


async def list_files(session: Session) -> str:
    """Return a heading and one line for each of the first MAX_FILES files and folders; "" if there are none.

    A line has the number of lines of a file, and the columns of a .csv file, or the number of files and the first names
    of a folder. The text of a short file follows, indented. Also "" if the command fails: the image may have no
    shell.
    """
    try:
        result = await session.exec(["sh", "-c", _SCRIPT], timeout_s=LIMIT_S)
    except ToolcrewError as error:
        log.info("files_not_listed", session=session.id, error=str(error))
        return ""
    text = result.stdout[:MAX_BYTES].decode(errors="replace")
    lines = [_show_line(line) for line in text.splitlines() if line.strip()]
    return "\n".join([_HEADING, *lines]) if lines else ""


def _show_line(line: str) -> str:
    """Return the line without invisible characters. Spaces stay, because they matter in code."""
    return " ".join(map(clean_line, line.rstrip().split(" ")))[:MAX_LINE_CHARS]
