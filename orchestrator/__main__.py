"""Runs the command `toolcrew` as `python -m toolcrew.orchestrator`."""

from toolcrew.orchestrator.command import main

if __name__ == "__main__":
    main()
