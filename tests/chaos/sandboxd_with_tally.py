"""sandboxd whose sandboxes have a folder of the host at /tally. Data that commands append there outlives sandbox,
session and host.
"""

import os
import sys
from typing import Any

from workers.sandboxd.__main__ import main
from workers.sandboxd.runtime import engine_runtime
from workers.sandboxd.runtime.hardening import SandboxSpec, build_container_config


def build_with_tally(spec: SandboxSpec) -> dict[str, Any]:
    """Return the profile's configuration with one additional mount, which exists only in tests."""
    config: dict[str, Any] = build_container_config(spec)
    mount = {"Type": "bind", "Source": os.environ["TALLY"], "Target": "/tally"}
    config["HostConfig"]["Mounts"] = [*(config["HostConfig"].get("Mounts") or []), mount]
    return config


if __name__ == "__main__":
    engine_runtime.build_container_config = build_with_tally
    sys.exit(main())
