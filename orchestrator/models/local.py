"""The embedded small model: a server as a child process, and the Model class that sends it requests."""

import asyncio
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from toolcrew.contract.errors import ModelUnavailable
from toolcrew.contract.programs import program
from toolcrew.contract.settings import child_environment
from toolcrew.orchestrator.models.openai import OpenAIModel

# Greedy sampling. The prompt cache makes a step three times as fast. It changes rounding, which can change the wording
# of an answer, but not its facts.
SAMPLING: dict[str, Any] = {"temperature": 0, "seed": 7, "max_tokens": 160, "cache_prompt": True}
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 300.0
# This server has no other clients. If it does not answer, it is dead.
RETRIES = 1
PACKAGE_ROOT = Path(__file__).absolute().parents[3]


class LocalModelServer:
    """Context manager that starts the server process on entering and stops the process on leaving. The server also
    exits when this process dies.
    """

    def __init__(self, weights: Path, *, threads: int = 1, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self._weights = weights.resolve()
        self._threads = threads
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._models: list[OpenAIModel] = []
        self.api_key = secrets.token_urlsafe(24)
        self.base_url = ""
        self.model_name = ""

    @property
    def pid(self) -> int | None:
        """Return the pid of the server process, or None when there is none."""
        return self._process.pid if self._process is not None else None

    def open_model(self, extra: dict[str, Any] | None = None, *, streaming: bool = True) -> OpenAIModel:
        """Return a model on this server. The model is closed together with the server. `extra` overrides parts of the
        sampling settings.
        """
        recipe = {**SAMPLING, **(extra or {})}
        model = OpenAIModel(
            self.model_name, self.base_url, self.api_key, REPLY_TIMEOUT_S, recipe, retries=RETRIES, streaming=streaming
        )
        self._models.append(model)
        return model

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text. Raises ModelUnavailable."""
        headers = {"Authorization": f"Bearer {self.api_key}"}
        url = f"{self.base_url.removesuffix('/v1')}/tokenize"
        try:
            async with httpx.AsyncClient(headers=headers, timeout=REPLY_TIMEOUT_S) as client:
                replies = [(await client.post(url, json={"content": text})).raise_for_status() for text in texts]
        except httpx.HTTPError as error:
            raise ModelUnavailable(f"the local model did not count tokens ({error}): try again") from error
        return [len(reply.json()["tokens"]) for reply in replies]

    async def __aenter__(self) -> "LocalModelServer":
        """Start the server. Raises ModelUnavailable when it does not start in time."""
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._start()
        except BaseException as error:
            await self._stop()
            if isinstance(error, TimeoutError):
                raise ModelUnavailable(
                    f"the local model did not load in {self._start_timeout_s:.0f} s. Check whether the machine is "
                    "overloaded, and try again."
                ) from None
            raise
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for model in self._models:
            await model.aclose()
        await self._stop()

    async def _start(self) -> None:
        command = [*program("toolcrew.orchestrator.models.local_server")]
        command += ["--weights", str(self._weights), "--threads", str(self._threads)]
        pipe, silent = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        # Python finds the package even if it is not installed, and imports nothing from the current folder.
        environment = child_environment({"PYTHONPATH": str(PACKAGE_ROOT)})
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=silent, env=environment
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"api_key": self.api_key}).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise ModelUnavailable(
                f"the local model's server ended while loading {self._weights}: are xllamacpp (pip install "
                "'toolcrew[local-model]') and the library libgomp (apt install libgomp1) installed? Run "
                "`python -m toolcrew.orchestrator.models.local_server` yourself to see the reason"
            )
        ready = json.loads(line)
        self.base_url, self.model_name = ready["base_url"], ready["model"]

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
