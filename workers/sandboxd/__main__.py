"""`python -m toolcrew.workers.sandboxd`: runs the daemon (program.py), or logs which package is missing."""

import sys

from toolcrew.contract.extras import explain_missing
from toolcrew.contract.startup import importing_program
from toolcrew.workers.logs import log_not_started
from toolcrew.workers.sandboxd.runtime.cgroup_namespace import enter_host_namespace


def main() -> int:
    try:
        enter_host_namespace()
    except OSError as error:
        log_not_started("sandboxd", error)
        return 1
    try:
        with importing_program():
            from toolcrew.workers.sandboxd.program import main as run
    except ModuleNotFoundError as error:
        log_not_started("sandboxd", explain_missing(error))
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
