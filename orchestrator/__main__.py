"""`python -m orchestrator`: the command `toolcrew`, for programs that know the interpreter and not where commands
lie.
"""

from orchestrator.cli.main import main

if __name__ == "__main__":
    main()
