"""The command `toolcrew` as it is installed: everything it does is in cli.py; here it is said when a package is missing
for that.
"""

import sys

from contract.extras import explain_missing


def main() -> None:
    """Entry point. Needs nothing but the standard library and what the distribution itself requires."""
    try:
        from orchestrator.cli.main import main as run
    except ModuleNotFoundError as error:
        sys.stderr.write(f"toolcrew: {explain_missing(error)}\n")
        sys.exit(1)
    run()
