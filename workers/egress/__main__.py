"""`python -m toolcrew.workers.egress`: run the egress proxy."""

import asyncio
import sys

from toolcrew.contract.errors import OperatorError
from toolcrew.contract.settings import EgressSettings, read_environment
from toolcrew.workers.egress.daemon import run
from toolcrew.workers.logs import configure_logging, log_not_started


def main() -> int:
    try:
        settings = read_environment(EgressSettings)
        configure_logging("egress", settings)
        asyncio.run(run(settings))
    except (OperatorError, OSError) as error:
        log_not_started("egress", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
