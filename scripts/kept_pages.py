"""Pages that scripts make of the code: written, or with `--check` compared with what lies there."""

import sys
from pathlib import Path


def keep_page(path: Path, page: str, says: str) -> int:
    """The exit status of such a script. `says`: what the page has to agree with, in words."""
    if "--check" not in sys.argv[1:]:
        path.write_text(page, encoding="utf-8")
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == page:
        return 0
    print(f"docs/{path.name} is not what {says}: run .venv/bin/python scripts/reference.py", file=sys.stderr)
    return 1
