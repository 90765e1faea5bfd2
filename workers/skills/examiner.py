"""Parses the content of session skills in a separate process.

A parser that fails or exceeds a limit ends only that call.
"""

import hashlib
import json
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import structlog

from toolcrew.contract.programs import program
from toolcrew.contract.settings import parser_environment
from toolcrew.contract.skills import SkillBroken

EXAMINE_S = 20.0
MAX_CACHED = 256
"""Maximum number of cached answers. The key is the content, so a process starts only for new content."""
_MAX_ANSWER_BYTES = 4 * 1024 * 1024

log = structlog.get_logger(__name__)


class SkillExaminer:
    """Runs `python -m toolcrew.workers.skills` with bytes on its standard input. All threads of a worker share
    one instance.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, dict[str, Any]] = OrderedDict()

    def examine(self, arguments: Sequence[str], data: bytes) -> dict[str, Any]:
        """Run the process on `data`, or use a cached answer. Return its answer. Raises SkillBroken: the process found a
        fault, failed, or reached a limit.
        """
        key = hashlib.sha256("\0".join(arguments).encode() + b"\0" + data).digest()
        with self._lock:
            answer = self._cache.get(key)
        if answer is None:
            answer = _run(arguments, data)
            with self._lock:
                self._cache[key] = answer
                while len(self._cache) > MAX_CACHED:
                    self._cache.popitem(last=False)
        if "broken" in answer:
            raise SkillBroken(answer["broken"])
        return answer


def _run(arguments: Sequence[str], data: bytes) -> dict[str, Any]:
    # `program` and `cwd="/"`: Python must not import a module from the current folder. The environment has no secrets.
    command = program("toolcrew.workers.skills", *arguments)
    try:
        process = subprocess.run(
            command, input=data, capture_output=True, check=True, timeout=EXAMINE_S, env=parser_environment(), cwd="/"
        )
        if len(process.stdout) > _MAX_ANSWER_BYTES:
            return {"broken": "its description is too long"}
        answer: dict[str, Any] = json.loads(process.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        log.warning(
            "skill_not_examined",
            error=str(error),
            stderr=(getattr(error, "stderr", None) or b"")[-500:].decode(errors="replace"),
        )
        return {"broken": "the examination reached its limit of time or memory: make the skill smaller or simpler"}
    return answer
