"""The file of MCP servers: the format of the protocol's clients is accepted, and errors are reported before anything
starts.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from toolcrew.contract.errors import ConfigError
from toolcrew.workers.mcp.settings import HttpEntry, StdioEntry, load_servers

ENVIRONMENT = {"DOCS_TOKEN": "s3cr3t"}
DOCS = {"url": "https://docs.example/mcp", "headers": {"Authorization": "Bearer ${DOCS_TOKEN}"}}
GIT = {"command": "git-server", "args": ["--quiet"], "env": {"LEVEL": "1"}, "network": "none"}


def _write(folder: Path, servers: Any) -> Path:
    path = folder / "servers.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    return path


def _load_error(folder: Path, servers: Any) -> str:
    """Return the error message, which is the same for both workers."""
    path, errors = _write(folder, servers), []
    kinds: tuple[type[HttpEntry] | type[StdioEntry], ...] = (HttpEntry, StdioEntry)
    for kind in kinds:
        try:
            load_servers(path, kind, ENVIRONMENT)
        except ConfigError as error:
            errors.append(str(error))
    return errors[0]


def test_unset_file_means_no_servers() -> None:
    assert load_servers(None, HttpEntry, {}) == {}


def test_http_and_stdio_entries_are_read_with_defaults(tmp_path: Path) -> None:
    path = _write(tmp_path, {"docs": {**DOCS, "tenants": ["acme"], "timeout_s": 5}, "git": GIT})
    [docs] = load_servers(path, HttpEntry, ENVIRONMENT).values()
    [git] = load_servers(path, StdioEntry, ENVIRONMENT).values()
    assert (docs.tenants, docs.trust, docs.timeout_s, docs.private) == (("acme",), "untrusted", 5, False)
    assert docs.headers["Authorization"].get_secret_value() == "Bearer s3cr3t"
    assert (git.args, git.network, git.tenants) == (("--quiet",), "none", None)
    assert "s3cr3t" not in repr(docs)


def test_worker_needs_only_the_secrets_of_its_own_server_kind(tmp_path: Path) -> None:
    path = _write(tmp_path, {"docs": DOCS, "git": GIT})
    assert list(load_servers(path, StdioEntry, {})) == ["git"]
    with pytest.raises(ConfigError, match="DOCS_TOKEN"):
        load_servers(path, HttpEntry, {})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "either 'url'"),
        ({**DOCS, **GIT}, "either 'url'"),
        ({"command": "x"}, '"network": "none"'),
        ({**GIT, "network": "all"}, "network"),
        ({**DOCS, "tennants": ["acme"]}, "tennants"),
        ({**DOCS, "tenants": []}, "tenants"),
        ({**DOCS, "tenants": ["no name"]}, "tenants"),
        ({**DOCS, "trust": "yes"}, "trust"),
        ({**DOCS, "timeout_s": "5"}, "timeout_s"),
        ({**DOCS, "timeout_s": -1}, "timeout_s"),
        ({**DOCS, "url": "http://docs.example/mcp"}, '"private": true'),
        ({**DOCS, "url": "ftp://docs.example/"}, "only http and https"),
        ({**DOCS, "url": "https://me:pw@docs.example/"}, "user name or password"),
        ({**DOCS, "headers": {"Authorization": "Bearer abc"}}, "${NAME}"),
        ({**DOCS, "headers": {"X-Api-Key": "abc"}}, "${NAME}"),
        ({**DOCS, "headers": {"X": "${NOT_SET}"}}, "set NOT_SET in"),
        ({**DOCS, "headers": {"X": "a\r\nb"}}, "not a header"),
        ({**DOCS, "headers": {"Host": "other"}}, "set by the worker"),
        ({**DOCS, "headers": {"Mcp-Session-Id": "x"}}, "set by the worker"),
        ({**GIT, "env": {"A-B": "x"}}, "not a valid environment variable"),
        ({**GIT, "env": {"GIT_TOKEN": "x"}}, "${NAME}"),
        ({**GIT, "command": ""}, "command"),
    ],
)
def test_invalid_entry_is_refused_with_a_reason(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    error = _load_error(tmp_path, {"one": entry})
    assert "TOOLCREW_MCP_SERVERS" in error
    assert "server 'one'" in error
    assert message in error


@pytest.mark.parametrize("name", ["", "a__b", "_a", "a-", "a b", "\u00e4", "x" * 33])
def test_invalid_server_name_is_refused(tmp_path: Path, name: str) -> None:
    assert "rename it" in _load_error(tmp_path, {name: DOCS})


def test_error_message_contains_no_secret(tmp_path: Path) -> None:
    for invalid in ({"private": "${DOCS_TOKEN}"}, {"url": "${DOCS_TOKEN}"}, {"tenants": ["${DOCS_TOKEN} x"]}):
        assert "s3cr3t" not in _load_error(tmp_path, {"docs": {**DOCS, **invalid}})


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"mcpServers": []}', '{"mcpServers": {}, "more": 1}', "[" * 100_000]
)
def test_file_with_another_structure_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "servers.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="TOOLCREW_MCP_SERVERS"):
        load_servers(path, HttpEntry, ENVIRONMENT)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Create the file, or unset the variable"):
        load_servers(tmp_path / "none.json", HttpEntry, {})
