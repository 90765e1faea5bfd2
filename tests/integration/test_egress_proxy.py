"""Real clients through the egress proxy: curl, pip and git against loopback servers over HTTP and TLS, and the
messages of refusals.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sandboxd.egress_harness import Harness, build_rules, open_harness, open_tcp_port
from tests.support.web.package_site import build_site, open_site
from tests.support.web.web_certificate import server_context, write_authority

RUN_S = 60.0


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    with open_harness() as opened:
        yield opened


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module", params=["http", "https"])
def site_url(request: pytest.FixtureRequest, site: Path) -> Iterator[tuple[str, int]]:
    """Return the start of the files' URLs, and the port."""
    with open_site(site, server_context() if request.param == "https" else None) as port:
        yield f"{request.param}://site.example:{port}", port


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_authority(tmp_path_factory.mktemp("tls") / "authority.pem"))


def run(*argv: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    clean = {
        name: value for name, value in os.environ.items() if "proxy" not in name.lower() and not name.startswith("PIP_")
    }
    return subprocess.run(argv, env=clean | environment, capture_output=True, text=True, timeout=RUN_S, check=False)


def test_curl_downloads(
    harness: Harness, site_url: tuple[str, int], authority: str, site: Path, tmp_path: Path
) -> None:
    url, port = site_url
    with open_tcp_port(harness, build_rules(port)) as proxy:
        completed = run("curl", "-sS", "-x", proxy, "--cacert", authority, "-o", str(tmp_path / "got"), f"{url}/big")
    assert (completed.returncode, completed.stderr) == (0, "")
    assert (tmp_path / "got").read_bytes() == (site / "big").read_bytes()


def test_curl_uploads_and_gets_a_response(harness: Harness, site_url: tuple[str, int], authority: str) -> None:
    url, port = site_url
    with open_tcp_port(harness, build_rules(port)) as proxy:
        options = ["-sS", "-x", proxy, "--cacert", authority, "--data-binary", "x" * 100_000, "-w", "%{http_code}"]
        completed = run("curl", *options, f"{url}/big")
    assert completed.stdout.endswith("501"), completed


def test_curl_shows_the_reason_of_a_refusal(harness: Harness, site_url: tuple[str, int]) -> None:
    url, port = site_url
    refused = url.replace("site.example", "evil.example")
    with open_tcp_port(harness, build_rules(port)) as proxy:
        completed = run("curl", "-sS", "-i", "-x", proxy, f"{refused}/big")
    assert "403" in completed.stdout + completed.stderr
    if url.startswith("http:"):
        assert "evil.example is not on this tenant's list; allowed: site.example" in completed.stdout


def test_the_client_sees_the_certificate_of_the_server(harness: Harness, site: Path) -> None:
    with open_site(site, server_context()) as port, open_tcp_port(harness, build_rules(port)) as proxy:
        completed = run("curl", "-sS", "-x", proxy, f"https://site.example:{port}/big")
    # The authority of the test is not in the system's list. If the proxy presented its own certificate, this client
    # could not detect that either.
    assert "self" in completed.stderr
    assert completed.returncode == 60


def test_a_client_with_another_server_name_in_its_tunnel_is_disconnected(harness: Harness, site: Path) -> None:
    with open_site(site, server_context()) as port, open_tcp_port(harness, build_rules(port)) as proxy:
        # Sends search.example as the server name in a tunnel that was requested for site.example.
        completed = run(
            *("curl", "-sS", "-k", "-x", proxy, "--connect-to", f"search.example:{port}:site.example:{port}"),
            f"https://search.example:{port}/big",
        )
    assert (completed.returncode, "unrecognized name" in completed.stderr) == (35, True), completed
