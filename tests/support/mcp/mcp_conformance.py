"""The protocol's own conformance suite, run against the first of two replicas: `scripts/mcp-conformance`. The suite
needs npm, so the run is not part of the tests.
"""

import http.client
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.support.mcp.mcp_stack import open_mcp_stack
from tests.support.stack.stack import require_engine
from tests.support.web.http_sites import serve_http

RUN_S = 120.0
SCENARIOS = {
    "2026-07-28": (
        "server-stateless",
        "tools-list",
        "dns-rebinding-protection",
        "http-header-validation",
        "server-sse-multiple-streams",
        "caching",
        "input-required-result-unsupported-methods",
        "input-required-result-ignore-extra-params",
    ),
    "2025-11-25": ("server-initialize", "server-session-lifecycle", "ping", "tools-list", "dns-rebinding-protection"),
}
NOT_OFFERED = frozenset(
    {
        # A tool that only the suite's own server has.
        "sep-2575-server-rejects-undeclared-capability",
        "sep-2575-missing-capability-http-400",
        # Prompts and resources.
        "sep-2549-prompts-list-caching-hints",
        "sep-2549-resources-list-caching-hints",
        "sep-2549-resources-templates-list-caching-hints",
    }
)


class _KeyProxy(BaseHTTPRequestHandler):
    """A proxy that adds an API key to requests, because the suite cannot send a key."""

    protocol_version = "HTTP/1.1"
    port = 0
    key = ""

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the suite reports the failures."""

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=RUN_S)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        connection.request(self.command, self.path, body, {**headers, "Authorization": f"Bearer {self.key}"})
        answer = connection.getresponse()
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        while data := answer.read1(65_536):
            self.wfile.write(data)
        self.close_connection = True
        connection.close()

    do_GET = do_POST = do_DELETE = _forward  # names that the base class looks for


@contextmanager
def _open_proxy(port: int, key: str) -> Iterator[str]:
    with serve_http(type("_Door", (_KeyProxy,), {"port": port, "key": key})) as own:
        yield f"http://127.0.0.1:{own}/mcp"


def _run_scenario(suite: Path, url: str, revision: str, scenario: str) -> list[str]:
    """Print the checks of one scenario and return the unexpected failures."""
    programs = suite / "node_modules" / ".bin"
    with tempfile.TemporaryDirectory() as folder:
        command: list[Path | str] = [
            programs / "node",
            programs / "conformance",
            "server",
            "--url",
            url,
            "--scenario",
            scenario,
        ]
        ran = subprocess.run(
            [*command, "--spec-version", revision, "-o", folder],
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        found = list(Path(folder).rglob("checks.json"))
        if not found:
            sys.stderr.write(ran.stdout + ran.stderr)
            return [f"{scenario}: it did not run"]
        checks = json.loads(found[0].read_text())
    failed = []
    for check in checks:
        state = (
            "not offered" if check["status"] == "FAILURE" and check["id"] in NOT_OFFERED else check["status"].lower()
        )
        sys.stdout.write(f"{revision}  {scenario:42} {check['id']:64} {state}\n")
        failed += [f"{scenario}: {check['id']}: {check.get('errorMessage')}"] if state == "failure" else []
    return failed


def main() -> int:
    suite, failed = Path(sys.argv[1]), list[str]()
    with open_mcp_stack(require_engine()) as stack, _open_proxy(stack.servers[0].port, stack.keys["acme"]) as url:
        for revision, scenarios in SCENARIOS.items():
            for scenario in scenarios:
                failed += _run_scenario(suite, url, revision, scenario)
    sys.stderr.writelines(f"failed: {connection}\n" for connection in failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
