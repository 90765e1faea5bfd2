"""Build the synchronous client of the HTTP API from the asynchronous one: the same text without `async` and `await`."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

SOURCE = ROOT / "orchestrator" / "sdk" / "http" / "async_client.py"
TARGET = ROOT / "orchestrator" / "sdk" / "http" / "client.py"
_RULES = (
    (r"await asyncio\.to_thread\(([\w.]+(?:\([^()]*\)\.\w+)?)(?:, )?", r"\1("),
    (r"asyncio\.sleep", "time.sleep"),
    (r"^import asyncio\n", ""),
    (r"^import inspect\n", ""),
    (r"(    )done = (handler\(\*texts\))\n    if inspect.isawaitable\(done\):\n        await done\n", r"\1\2\n"),
    (r"^import json\n", "import json\nimport time\n"),
    (r"async (def|with|for) ", r"\1 "),
    (r"(?<=\[)(\w+) async for", r"\1 for"),
    (r"\bawait ", ""),
    (r"AsyncGenerator, AsyncIterator, Callable, Iterable", "Callable, Generator, Iterable, Iterator"),
    (r"AsyncGenerator", "Generator"),
    (r"AsyncIterator", "Iterator"),
    (r"\basynccontextmanager", "contextmanager"),
    (r"\baclosing\(", "closing("),
    (r"import aclosing, contextmanager", "import closing, contextmanager"),
    (r"\ba(close|read)\(", r"\1("),
    (r"\baiter_", "iter_"),
    (r"__a(enter|exit)__", r"__\1__"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"Asynchronous client", "Synchronous client"),
    (r"asynchronous", "synchronous"),
)


def build_source() -> str:
    """Return the source of the synchronous client."""
    text = SOURCE.read_text(encoding="utf-8")
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(TARGET), "-"]
    return subprocess.run(ruff, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
