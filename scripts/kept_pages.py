"""Pages that scripts generate from the code. A script writes its page, or compares the page with the file
(`--check`).
"""

import sys
from pathlib import Path


def keep_page(path: Path, page: str, says: str) -> int:
    """Write or compare a page, and return the exit status of the script. `says`: what the page is generated from, for
    the message.
    """
    if "--check" not in sys.argv[1:]:
        path.write_text(page, encoding="utf-8")
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == page:
        return 0
    print(f"docs/{path.name} is not what {says}: run .venv/bin/python scripts/reference.py", file=sys.stderr)
    return 1
