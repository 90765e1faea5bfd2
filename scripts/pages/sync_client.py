"""Build the modules of the synchronous client of the HTTP API from the asynchronous ones: the same text without `async`
and `await`.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

_FOLDER = ROOT / "orchestrator" / "sdk" / "http"
TARGETS = {
    _FOLDER / f"{name}.py": _FOLDER / f"async_{name}.py"
    for name in ("client", "files", "ports", "processes", "sockets")
}
"""Synchronous module -> the asynchronous one that it is made from."""
_RULES = (
    (r"await asyncio\.to_thread\(([\w.]+(?:\([^()]*\)\.\w+)?)(?:, )?", r"\1("),
    (r"asyncio\.sleep", "time.sleep"),
    (r"asyncio\.Lock", "threading.Lock"),
    (r"^import asyncio\n", "import threading\nimport time\n"),
    (r"(?<=sdk\.http\.)async_", ""),
    (r"websockets\.asyncio", "websockets.sync"),
    (r"connection\.transport\.get_extra_info\(\"socket\"\)", "connection.socket"),
    (r"^import inspect\n", ""),
    (r"(    )done = (handler\(\*texts\))\n    if inspect.isawaitable\(done\):\n        await done\n", r"\1\2\n"),
    (r"async (def|with|for) ", r"\1 "),
    (r"(?<=\[)(\w+) async for", r"\1 for"),
    (r"\bawait ", ""),
    (r"AsyncGenerator", "Generator"),
    (r"AsyncIterator", "Iterator"),
    (r"\basynccontextmanager", "contextmanager"),
    (r"\baclosing\b", "closing"),
    (r"\ba(close|read)\(", r"\1("),
    (r"\baiter_", "iter_"),
    (r"__a(enter|exit|iter)__", r"__\1__"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"Asynchronous client", "Synchronous client"),
    (r"asynchronous", "synchronous"),
)


def build_source(target: Path) -> str:
    """Return the source of a module of the synchronous client."""
    text = TARGETS[target].read_text(encoding="utf-8")
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    # Imports of the other kind are in another order, and some are not needed.
    for command in (["check", "--quiet", "--fix", "--select", "I,F401"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(target), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text
