"""What is said when a framework that an adapter needs is not installed."""

from contract.errors import ConfigError


def missing_extra(error: ModuleNotFoundError, module: str, extra: str) -> Exception:
    """A ConfigError that names the extra; the error itself where the framework is there and something of its own is not."""
    if (error.name or "").partition(".")[0] != module:
        return error
    return ConfigError(f"this adapter needs the package that brings '{module}': pip install 'toolcrew[{extra}]'")
