"""What the entry point may tell the guest: how long it lives, and whether there is a proxy to relay to."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_LONGEST_LIFE_S = 1e9


class Options:
    """`life_s`: seconds from the start after which the sandbox ends by itself; None: never. `proxy_port`: None without network."""

    __slots__ = ("life_s", "proxy_port")

    def __init__(self, life_s: float | None = None, proxy_port: int | None = None) -> None:
        self.life_s = life_s
        self.proxy_port = proxy_port


def parse_options(arguments: Sequence[str]) -> Options:
    """`--life SECONDS` above 0, `--proxy PORT`. Raises ValueError for anything else: a limit that was misread would be none."""
    options = Options()
    names = iter(arguments)
    for name in names:
        value = next(names, None)
        if value is None:
            raise ValueError(f"{name} without a value")
        if name == "--life":
            options.life_s = _parse_life(value)
        elif name == "--proxy":
            options.proxy_port = _parse_port(value)
        else:
            raise ValueError(f"unknown option {name}")
    return options


def _parse_life(value: str) -> float:
    life_s = float(value)
    # Also not "nan", which no clock ever passes, nor "inf".
    if not 0 < life_s < _LONGEST_LIFE_S:
        raise ValueError(f"--life {value} is no number of seconds")
    return life_s


def _parse_port(value: str) -> int:
    port = int(value)
    if not 0 < port < 65536:
        raise ValueError(f"--proxy {value} is no port")
    return port
