"""Runs the command `toolcrew` as `python -m orchestrator`."""

from orchestrator.command import main

if __name__ == "__main__":
    main()
