"""Has what a session says of its skills read by a process of its own: a parser that fails or takes too much costs that
call only.
"""

import hashlib
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import structlog

from contract.settings import parser_environment
from contract.skills import SkillBroken

EXAMINE_S = 20.0
MAX_KEPT = 256
"""Answers that are kept, by the content that they are about: a process is started only for what has changed."""
_MAX_ANSWER_BYTES = 4 * 1024 * 1024

log = structlog.get_logger(__name__)


class SkillExaminer:
    """Runs `python -m workers.skills` with bytes on its standard input. One for all threads of a worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, dict[str, Any]] = OrderedDict()

    def ask(self, arguments: Sequence[str], data: bytes) -> dict[str, Any]:
        """The answer about `data`. Raises SkillBroken when the process found a fault, failed, or reached a limit."""
        key = hashlib.sha256("\0".join(arguments).encode() + b"\0" + data).digest()
        with self._lock:
            answer = self._kept.get(key)
        if answer is None:
            answer = _run(arguments, data)
            with self._lock:
                self._kept[key] = answer
                while len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        if "broken" in answer:
            raise SkillBroken(answer["broken"])
        return answer


def _run(arguments: Sequence[str], data: bytes) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "workers.skills", *arguments]
    try:
        done = subprocess.run(
            command, input=data, capture_output=True, check=True, timeout=EXAMINE_S, env=parser_environment(), cwd="/"
        )
        if len(done.stdout) > _MAX_ANSWER_BYTES:
            return {"broken": "what it says of itself is too long"}
        answer: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        log.warning(
            "skill_not_examined",
            error=str(error),
            stderr=(getattr(error, "stderr", None) or b"")[-500:].decode(errors="replace"),
        )
        return {"broken": "it could not be examined within the limits of time and memory: make it smaller and simpler"}
    return answer
