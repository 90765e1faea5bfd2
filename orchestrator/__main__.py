"""Starts the command `toolcrew`: as it is installed, and as `python -m orchestrator`."""

import sys

from contract.extras import explain_missing


def main() -> None:
    """Run the command. Without an extra that it needs, print which one, and exit with 1."""
    try:
        from orchestrator.command import main as run
    except ModuleNotFoundError as error:
        sys.stderr.write(f"toolcrew: {explain_missing(error)}\n")
        sys.exit(1)
    run()


if __name__ == "__main__":
    main()
