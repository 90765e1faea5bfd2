"""What the entry point may tell the guest: how long it lives, and whether there is a proxy to relay to."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class Options:
    """`life_s`: seconds from the start after which the sandbox ends by itself; None: never. `proxy_port`: None without network."""

    __slots__ = ("life_s", "proxy_port")

    def __init__(self, life_s: float | None = None, proxy_port: int | None = None) -> None:
        self.life_s = life_s
        self.proxy_port = proxy_port


def parse_options(arguments: Sequence[str]) -> Options:
    """`--life SECONDS`, `--proxy PORT`. Raises ValueError for anything else: a limit that was misread would be none."""
    options = Options()
    names = iter(arguments)
    for name in names:
        value = next(names, None)
        if value is None:
            raise ValueError(f"{name} without a value")
        if name == "--life":
            options.life_s = float(value)
        elif name == "--proxy":
            options.proxy_port = int(value)
        else:
            raise ValueError(f"unknown option {name}")
    return options
