"""The options of `run` and `call` that say what the session begins with."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Workspace = Annotated[
    Path | None,
    typer.Option("--workspace", help="A folder, an archive (tar, tar.gz, ..., zip) or a git bundle to begin with."),
]
Restore = Annotated[str | None, typer.Option("--restore", help="A checkpoint to begin with, by its id.")]
Network = Annotated[
    Literal["none", "egress"] | None,
    typer.Option("--network", help="egress: the hosts that the operator allows. Else as the tenant's class says."),
]
