"""File in TOOLCREW_MCP_SERVERS: the MCP servers, their tenants, and the trust in each server."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from toolcrew.contract.calls import MAX_TIMEOUT_S
from toolcrew.contract.errors import ConfigError, ToolFailure
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.specs import MAX_TOOL_TENANTS, TenantName
from toolcrew.workers.web.urls import Target, parse_url

SETTING = "TOOLCREW_MCP_SERVERS"
MAX_FILE_BYTES = 1024 * 1024
MAX_SERVERS = 100
DEFAULT_TIMEOUT_S = 60.0
DEFAULT_IDLE_S = 300.0
MAX_IDLE_S = 86_400.0
_SERVER_NAME = re.compile(r"[A-Za-z0-9]+(?:[_-][A-Za-z0-9]+)*")
"""Server names have no double underscore and none at an end, so a tool's name shows where the server's name ends."""
MAX_SERVER_NAME = 32
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SECRET = re.compile(r"authori[sz]ation|cookie|key|token|secret|passw", re.IGNORECASE)
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]{1,8192}")
_OWN_HEADERS = frozenset(
    {"accept", "accept-encoding", "connection", "content-length", "content-type", "host", "te", "transfer-encoding"}
)

Pattern = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]


class _Entry(BaseModel):
    """Fields of every server. `include`, `exclude`: patterns for the server's own tool names, in which `*` matches any
    text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    tenants: Annotated[tuple[TenantName, ...], Field(min_length=1, max_length=MAX_TOOL_TENANTS)] | None = None
    trust: Literal["trusted", "untrusted"] = "untrusted"
    include: Annotated[tuple[Pattern, ...], Field(max_length=200)] = ("*",)
    exclude: Annotated[tuple[Pattern, ...], Field(max_length=200)] = ()
    timeout_s: float = Field(default=DEFAULT_TIMEOUT_S, gt=0, le=MAX_TIMEOUT_S)


class HttpEntry(_Entry):
    """A server at a URL. `private`: the address may belong to a private network."""

    type: Literal["http", "streamable-http", "streamableHttp"] | None = None
    url: str = Field(max_length=2048)
    headers: dict[str, SecretStr] = {}
    private: bool = False

    @field_validator("headers")
    @classmethod
    def _are_headers(cls, headers: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name, value in headers.items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value.get_secret_value()):
                raise ValueError(f"'{name[:40]}' is not a header of plain ASCII, or its value is empty. Correct it.")
            if name.lower() in _OWN_HEADERS or name.lower().startswith("mcp-"):
                raise ValueError(f"the header {name} is set by the worker. Remove it.")
        return headers

    @model_validator(mode="after")
    def _is_reachable(self) -> "HttpEntry":
        try:
            target = parse_url(self.url)
        except ToolFailure as failure:
            raise ValueError(failure.message) from None
        if target.scheme == "http" and not self.private:
            raise ValueError(
                'http:// sends keys and answers unencrypted: use https://, or say "private": true for a server of '
                "your own network"
            )
        return self

    def target(self) -> Target:
        """Return the target of the server's requests."""
        return parse_url(self.url)


class StdioEntry(_Entry):
    """A program that runs inside the session's sandbox.

    `network`: "none" refuses the server in a session with network; "session" gives it the session's network. `image`:
    the image of the sandbox that lists its tools; None means the default image. `idle_s`: seconds without a call after
    which a session stops the program; 0 starts it again for each call.
    """

    type: Literal["stdio"] | None = None
    command: Text
    args: Annotated[
        tuple[Annotated[str, Field(max_length=16_384, pattern=r"^[^\x00]*$")], ...], Field(max_length=200)
    ] = ()
    env: Annotated[dict[str, SecretStr], Field(max_length=200)] = {}
    cwd: Text | None = None
    network: Literal["none", "session"]
    image: Text | None = None
    idle_s: float = Field(default=DEFAULT_IDLE_S, ge=0, le=MAX_IDLE_S)

    @field_validator("env")
    @classmethod
    def _are_variables(cls, env: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name, value in env.items():
            if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]{0,199}", name) or "\x00" in value.get_secret_value():
                raise ValueError(f"'{name[:40]}' is not a valid environment variable. Fix its name or value.")
        return env


Entry = HttpEntry | StdioEntry
E = TypeVar("E", HttpEntry, StdioEntry)


def load_servers(path: Path | None, entry_type: type[E], environment: Mapping[str, str]) -> dict[str, E]:
    """Return the servers of one kind in the file, by name; an empty dict without a file.

    For entries of the other kind only the types of the fields are checked: a worker does not need the secrets of
    servers that it does not call. `environment`: the variables for `${NAME}`.

    Raises ConfigError: an entry is wrong. The message names the entry and the fix, and never a variable's value.
    """
    if path is None:
        return {}
    source = f"{SETTING} ({path})"
    try:
        data = path.read_bytes()[: MAX_FILE_BYTES + 1]
        parsed = json.loads(data) if len(data) <= MAX_FILE_BYTES else None
    except OSError as error:
        raise ConfigError(
            f"{source} cannot be read ({error.strerror}). Create the file, or unset the variable."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid JSON ({type(error).__name__}). Fix it.") from None
    servers = parsed.get("mcpServers") if isinstance(parsed, dict) else None
    if not isinstance(parsed, dict) or not isinstance(servers, dict) or len(parsed) != 1 or len(servers) > MAX_SERVERS:
        raise ConfigError(
            f'{source}: write {{"mcpServers": {{NAME: {{...}}}}}}, at most {MAX_SERVERS} servers and {MAX_FILE_BYTES} '
            "bytes"
        )
    entries = {
        name: _parse_entry(f"{source}: server '{name[:60]}'", name, entry, entry_type, environment)
        for name, entry in servers.items()
    }
    return {name: entry for name, entry in entries.items() if entry is not None}


def _parse_entry(source: str, name: str, entry: Any, entry_type: type[E], environment: Mapping[str, str]) -> E | None:
    """Return the entry; None for an entry of the other kind."""
    if not _SERVER_NAME.fullmatch(name) or len(name) > MAX_SERVER_NAME:
        raise ConfigError(
            f"{source}: a name has letters, digits, and single - or _ between them, at most {MAX_SERVER_NAME} "
            "characters: rename it"
        )
    if not isinstance(entry, dict) or ("url" in entry) == ("command" in entry):
        raise ConfigError(f"{source}: give either 'url' for a server over HTTP, or 'command' for one in sandboxes")
    declared_type: type[HttpEntry | StdioEntry] = HttpEntry if "url" in entry else StdioEntry
    if declared_type is StdioEntry and "network" not in entry:
        raise ConfigError(
            f'{source}: say "network": "none" (refused in sessions with network) or "network": "session" (what the '
            "session has)"
        )
    _refuse_plain_secrets(source, entry)
    if declared_type is not entry_type:
        return None
    try:
        return entry_type.model_validate_json(json.dumps(_fill_variables(source, entry, environment)))
    except ValidationError as error:
        raise ConfigError(f"{source}: {describe_invalid(error, entry_type)}") from None


def _refuse_plain_secrets(source: str, entry: Mapping[str, Any]) -> None:
    """Raise ConfigError for a secret in plain text, because every copy of the file would contain it."""
    for field in ("headers", "env"):
        values = entry.get(field)
        for name, value in (values if isinstance(values, dict) else {}).items():
            if _SECRET.search(name) and isinstance(value, str) and not _VARIABLE.search(value):
                raise ConfigError(
                    f"{source}: {field}.{name[:60]} looks like a secret: write it as ${{NAME}}, and set NAME in the "
                    "worker's environment"
                )


def _fill_variables(source: str, value: Any, environment: Mapping[str, str]) -> Any:
    """Return `value` with every `${NAME}` in its texts replaced. Raises ConfigError for a variable
    that is not set.
    """
    if isinstance(value, dict):
        return {key: _fill_variables(source, part, environment) for key, part in value.items()}
    if isinstance(value, list):
        return [_fill_variables(source, part, environment) for part in value]
    if not isinstance(value, str):
        return value

    def fill(match: re.Match[str]) -> str:
        if not environment.get(match[1]):
            raise ConfigError(f"{source}: ${{{match[1]}}} is not set: set {match[1]} in the worker's environment")
        return environment[match[1]]

    return _VARIABLE.sub(fill, value)
