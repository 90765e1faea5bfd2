"""sandboxd whose sandboxes have a folder of the host at /tally: what their commands append there outlives sandbox,
session and host.
"""

import os
import sys
from typing import Any

from workers.sandboxd import plans
from workers.sandboxd.__main__ import main
from workers.sandboxd.runtime.hardening import build_container_config


def build_with_tally(**arguments: Any) -> dict[str, Any]:
    """The profile's configuration with one mount more, which no real one has."""
    config: dict[str, Any] = build_container_config(**arguments)
    mount = {"Type": "bind", "Source": os.environ["TALLY"], "Target": "/tally"}
    config["HostConfig"]["Mounts"] = [*(config["HostConfig"].get("Mounts") or []), mount]
    return config


if __name__ == "__main__":
    plans.build_container_config = build_with_tally
    sys.exit(main())
