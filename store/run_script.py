"""The Lua script of runs. runs.lua and durable_runs.lua define its steps, one for each change of runs and batches."""

import re
from importlib import resources
from typing import Any

from redis.exceptions import ConnectionError as LostConnection

from toolcrew.contract.names import deployment_key, runs_prefix
from toolcrew.contract.signing import UNSEAL_LUA
from toolcrew.store.audit import AUDIT_LUA
from toolcrew.store.connection import RedisClient
from toolcrew.store.memory import MEMORY_LUA
from toolcrew.store.scripts import Script
from toolcrew.store.tenants import PAUSE_LUA

_FOLDER = resources.files("toolcrew.store")
_STEPS = "\n".join(_FOLDER.joinpath(name).read_text(encoding="utf-8") for name in ("runs.lua", "durable_runs.lua"))
_CALL = "return steps[operation](unpack(values))"
_SCRIPT = Script(
    "\n".join([AUDIT_LUA, UNSEAL_LUA, PAUSE_LUA, MEMORY_LUA, _STEPS, _CALL]),
    args=("deployment", "runs", "operation", "values..."),
)
_PARAMETERS = {
    name: tuple(part for part in parameters.split(", ") if part != "...")
    for name, parameters in re.findall(r"^function steps\.(\w+)\(([^)]*)\)", _STEPS, re.MULTILINE)
}
"""The parameters of each step by its name, without `...`."""


class RunScript:
    """The script for the runs of one deployment."""

    def __init__(self, client: RedisClient, deployment: str) -> None:
        self._client = client
        self._deployment = deployment_key(deployment, "")
        self._runs = runs_prefix(deployment)

    async def run(self, operation: str, /, *rest: Any, **arguments: Any) -> Any:
        """Execute one step atomically, and return its reply. `operation`: the name of the step. `arguments`: all its
        parameters. `rest`: the values for `...`. Raises the errors of the Redis client.
        """
        values = self._arrange(operation, rest, arguments)
        try:
            return await _SCRIPT.run(self._client, **values)
        except LostConnection:
            # Redis was restarted, so the pooled connection is closed. Every step is repeatable.
            return await _SCRIPT.run(self._client, **values)

    def add_to(self, pipe: Any, operation: str, /, **arguments: Any) -> None:
        """Add one step to a pipeline."""
        _SCRIPT.add_to(pipe, **self._arrange(operation, (), arguments))

    def _arrange(self, operation: str, rest: tuple[Any, ...], arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the script. Raises TypeError: the step has other parameters."""
        names = _PARAMETERS[operation]
        if set(names) != set(arguments):
            raise TypeError(f"the step {operation} has the parameters {names}, not {tuple(arguments)}")
        values = [*(arguments[name] for name in names), *rest]
        return {"deployment": self._deployment, "runs": self._runs, "operation": operation, "values": values}
