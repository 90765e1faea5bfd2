"""`python -m toolcrew.workers.stream_gateway`: run the stream gateway of this host."""

import asyncio
import sys

from toolcrew.contract.errors import OperatorError
from toolcrew.contract.settings import StreamGatewaySettings, read_environment
from toolcrew.contract.startup import importing_program
from toolcrew.workers.logs import configure_logging, log_not_started


def main() -> int:
    try:
        settings = read_environment(StreamGatewaySettings)
        configure_logging("stream-gateway", settings)
        with importing_program():
            from toolcrew.workers.stream_gateway.daemon import run

        asyncio.run(run(settings))
    except (OperatorError, OSError) as error:
        log_not_started("stream-gateway", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
