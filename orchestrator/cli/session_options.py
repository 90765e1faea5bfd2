"""Options of `run` and `call` for the new session."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Workspace = Annotated[
    Path | None,
    typer.Option(
        "--workspace", help="Start with these files: a folder, an archive (tar, tar.gz, ..., zip) or a git bundle."
    ),
]
Restore = Annotated[str | None, typer.Option("--restore", help="Start with the files of this checkpoint id.")]
Network = Annotated[
    Literal["none", "egress"] | None,
    typer.Option(
        "--network",
        help="egress: reach the hosts that the operator allows. Default: the network of the tenant's class.",
    ),
]
