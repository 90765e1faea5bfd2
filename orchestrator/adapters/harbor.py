"""Environment of Harbor whose sandboxes are sessions of a pool (docs/integrations.md).

Harbor writes /tests, /solution and /logs and changes users, so each session runs as root in its sandbox. The tenant's
class must allow root and the image.
"""

import asyncio
import shlex
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.options import EnvironmentOptions
from harbor.environments.tar_transfer import pack_dir_to_bytes
from typing_extensions import override

from toolcrew.contract.calls import MAX_TIMEOUT_S
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.session_spec import MIB, SessionSpec
from toolcrew.orchestrator.adapters.inspect_users import OWN, read_as, run_as, write_as
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session

TTL_S = 24 * 3600.0
_COPIED_INSTRUCTIONS = ("FROM", "WORKDIR")
"""Instructions of a Dockerfile that need no build."""


class ToolcrewOptions(EnvironmentOptions):  # type: ignore[misc]
    """Options of an environment: `--ek network=egress`. `network` None: the default of the tenant's class."""

    network: Literal["none", "egress"] | None = None


class ToolcrewEnvironment(BaseEnvironment):  # type: ignore[misc]
    """A session of the pool that TOOLCREW_REDIS_URL names. Use it with `harbor run --environment-import-path
    toolcrew.orchestrator.adapters.harbor:ToolcrewEnvironment`.

    The image is `docker_image` of the task, or the image after FROM in a Dockerfile that has only FROM and WORKDIR. A
    command runs for at most 600 s.
    """

    options_model = ToolcrewOptions
    options: ToolcrewOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._stack = AsyncExitStack()
        self._session: Session | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    @override
    def type() -> str:
        return "toolcrew"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    @override
    def _validate_definition(self) -> None:
        """Raise ConfigError for a task whose image would have to be built."""
        self._find_image()

    def _find_image(self) -> tuple[str, str]:
        """Return the image and the working folder of the task."""
        image, folder = self.task_env_config.docker_image, "/"
        dockerfile = self.environment_dir / "Dockerfile"
        if image is not None:
            return image, self.task_env_config.workdir or folder
        if (self.environment_dir / "docker-compose.yaml").exists() or not dockerfile.exists():
            raise ConfigError(
                "the task needs docker compose, which toolcrew does not run: set docker_image in task.toml"
            )
        for line in filter(None, (line.partition("#")[0].split() for line in dockerfile.read_text().splitlines())):
            if line[0].upper() not in _COPIED_INSTRUCTIONS or len(line) != 2:
                raise ConfigError(
                    f"the Dockerfile needs a build ({' '.join(line)[:100]}): build and push the image, and set "
                    "docker_image in task.toml"
                )
            image, folder = (line[1], folder) if line[0].upper() == "FROM" else (image, line[1])
        if image is None:
            raise ConfigError("the Dockerfile has no FROM: set docker_image in task.toml")
        return image, self.task_env_config.workdir or folder

    @override
    async def start(self, force_build: bool) -> None:
        image, folder = self._find_image()
        config, is_offline = self.task_env_config, self._network_policy.network_mode.value == "no-network"
        spec = SessionSpec(
            image=image,
            ttl_s=TTL_S,
            network="none" if is_offline else self.options.network,
            user="root",
            cpus=self._override_cpus or config.cpus,
            memory_bytes=mib * MIB if (mib := self._override_memory_mb or config.memory_mb) else None,
        )
        try:
            client = await self._stack.enter_async_context(ToolClient.connect())
            self._session = await self._stack.enter_async_context(await client.open_session_from(spec))
            await self.exec(f"mkdir -p {shlex.quote(folder)}", cwd="/", user="root")
            await self.ensure_dirs(self._mount_targets(writable_only=True))
            await self._upload_environment_dir_after_start()
        except BaseException:
            await self._stack.aclose()
            raise

    @override
    async def stop(self, delete: bool) -> None:
        """Close the session. The session is removed even if `delete` is False, because no later command could
        reach it.
        """
        self._session = None
        await self._stack.aclose()

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a bash command. Raises OperatorError when the sandbox was lost, and TimeoutError when the time limit is
        reached.
        """
        limit_s = min(timeout_sec or MAX_TIMEOUT_S, MAX_TIMEOUT_S)
        name = self._resolve_user(user)
        done = await self._open_session().exec(
            run_as(OWN if name in (None, "root", "0", 0) else str(name), ["bash", "-c", command]),
            env=self._merge_env(env),
            cwd=cwd or self._find_image()[1],
            timeout_s=limit_s,
        )
        if done.timed_out:
            raise TimeoutError(f"the command did not end within {limit_s:g} s")
        return ExecResult(
            stdout=done.stdout.decode(errors="replace"),
            stderr=done.stderr.decode(errors="replace"),
            return_code=done.returncode,
        )

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        content = await asyncio.to_thread(Path(source_path).read_bytes)
        await write_as(self._open_session(), OWN, target_path, content)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        archive = await asyncio.to_thread(pack_dir_to_bytes, source_dir, include_root=False)
        await self._open_session().import_archive(archive.getvalue(), target_dir)

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        content = await read_as(self._open_session(), OWN, source_path)
        await asyncio.to_thread(_write, Path(target_path), content)

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._open_session().export(target_dir, source_dir)

    def _open_session(self) -> Session:
        if self._session is None:
            raise ConfigError("the environment is not started: call start first")
        return self._session


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
