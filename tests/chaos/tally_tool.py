"""An operator's tool that must not execute twice: the tool appends its call's id to the tally."""

import os
import time
from pathlib import Path

from toolcrew import tool


@tool
def tally_tool(call: str, seconds: float) -> str:
    """Append the id, then wait."""
    with open(Path(os.environ["TALLY"]) / call, "ab", buffering=0) as file:
        file.write(f"{call}\n".encode())
    time.sleep(seconds)
    return f"acted {call}"
