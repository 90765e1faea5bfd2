"""Real programs in a real sandbox use secrets that they cannot read: curl, git, pip, npm, httpx and the openai client."""

import contextlib
import ensurepip
import importlib.util
import io
import json
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.sandboxd.egress_harness import Harness, open_harness
from tests.support.sandboxd.egress_sandboxd import (
    run_script,
    running_sandboxd,
    sandboxd_environment,
    text_of,
    write_file,
)
from tests.support.stack.stack import Footprint, open_footprint, require_engine
from tests.support.stack.waiting import SOON_S, wait_until
from tests.support.web.package_site import build_site, open_private_site
from toolcrew.contract.secrets import build_placeholder
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.contract.tenancy import SandboxPolicy
from toolcrew.workers.sandbox_client import GuestResponse, SandboxClient

TOKEN = "private-canary-0123456789abcdef"
BASIC, HEADER = ("GIT_TOKEN", "PIP_TOKEN"), ("API_TOKEN", "NPM_TOKEN", "OPENAI_API_KEY")
TERMS = SandboxPolicy(tenant_class="fetching")
NODE_IMAGE = "toolcrew-sandbox-node:dev"
_PYTHON = (
    *("annotated_types", "anyio", "certifi", "h11", "httpcore", "httpcore2", "httpx", "httpx2", "idna", "jiter"),
    *("openai", "pydantic", "pydantic_core", "sniffio", "truststore", "typing_extensions", "typing_inspection"),
)


@dataclass
class SecretSandboxd:
    client_socket: Path
    port: int
    footprint: Footprint
    harness: Harness
    values: dict[str, Any]

    @property
    def host(self) -> str:
        return f"site.example:{self.port}"

    def run(self, script: str, name: str = "acme:s1", timeout_s: float = 60.0) -> GuestResponse:
        return run_script(self.client_socket, name, script, timeout_s, run="r1")

    def write(self, name: str, data: bytes) -> None:
        write_file(self.client_socket, "acme:s1", name, data)

    def has_answered(self) -> bool:
        """Return whether the kept connection has carried a request."""
        return text_of(self.run("cat kept.txt 2>/dev/null")).startswith("200")

    def exchange(self) -> None:
        """Do what the worker does every half second."""
        with SandboxClient(self.client_socket) as client:
            client.exchange_secrets({"acme": self.values})


@pytest.fixture(scope="module")
def sandboxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecretSandboxd]:
    api = require_engine()
    site = build_site(tmp_path_factory.mktemp("site"))
    with contextlib.ExitStack() as stack:
        footprint = stack.enter_context(open_footprint(api))
        port = stack.enter_context(open_private_site(site, TOKEN))
        harness = stack.enter_context(open_harness())
        environment = sandboxd_environment(footprint.folder, [port])
        environment["TOOLCREW_SANDBOX_IMAGES_ALLOWED"] = json.dumps([NODE_IMAGE])
        at = stack.enter_context(running_sandboxd(footprint, environment))
        (footprint.folder / "egress.sock").symlink_to(harness.path)
        fields = {"value": TOKEN, "hosts": [f"site.example:{port}"]}
        values = {
            **{name: {**fields, "place": "basic"} for name in BASIC},
            **{name: {**fields, "place": "header:Authorization"} for name in HEADER},
        }
        made = SecretSandboxd(at, port, footprint, harness, values)
        stop = threading.Event()

        def confirm() -> None:
            while not stop.wait(0.5):
                made.exchange()

        worker = threading.Thread(target=confirm)
        with SandboxClient(at) as client:
            client.open("acme", "s1", SessionSpec(secrets=(*BASIC, *HEADER)), policy=TERMS)
        worker.start()
        stack.callback(worker.join)
        stack.callback(stop.set)
        yield made


def install_python(sandboxes: SecretSandboxd) -> None:
    """Write the packages of this interpreter that httpx and openai need."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in _PYTHON:
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            origin = Path(spec.origin)
            source = origin.parent if origin.name.startswith("__init__.") else origin
            archive.add(source, source.name, filter=lambda one: None if "__pycache__" in one.name else one)
            for metadata in source.parent.glob(f"{name}-*.dist-info"):
                archive.add(metadata, metadata.name)
    sandboxes.write("packages.tgz", packed.getvalue())
    assert sandboxes.run("mkdir -p packages && tar -xzf packages.tgz -C packages").done["exit_code"] == 0


def test_curl_uses_a_secret(sandboxes: SecretSandboxd) -> None:
    program = shutil.which("curl")
    assert program is not None
    packed = io.BytesIO()
    libraries = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    with tarfile.open(fileobj=packed, mode="w:gz", dereference=True) as archive:
        archive.add(program, "curl/curl")
        for line in libraries.splitlines():
            path = Path(line.split()[2]) if "=>" in line else None
            if path is not None and not path.name.startswith(("libc.", "libresolv.", "libm.")):
                archive.add(path, f"curl/{path.name}")
    sandboxes.write("curl.tgz", packed.getvalue())
    call = (
        "tar -xzf curl.tgz; export LD_LIBRARY_PATH=$PWD/curl; "
        f'./curl/curl -sS -H "Authorization: Bearer $API_TOKEN" https://{sandboxes.host}/echo https://{sandboxes.host}/echo'
    )
    output = text_of(sandboxes.run(call))
    assert output.count(f"Bearer {'*' * len(TOKEN)}") == 2, output


def test_git_clones_over_https_with_a_password(sandboxes: SecretSandboxd) -> None:
    script = (
        f"rm -rf code; git clone -q https://user:$GIT_TOKEN@{sandboxes.host}/git/code.git code && "
        "git -C code log --format=%s && git -C code pull -q && cat code/.git/config"
    )
    output = text_of(sandboxes.run(script, timeout_s=90))
    assert output.startswith("first\n"), output
    assert TOKEN not in output


def test_pip_installs_from_a_private_index(sandboxes: SecretSandboxd) -> None:
    wheel = next(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"))
    sandboxes.write("pip.whl", wheel.read_bytes())
    options = "-q --no-deps --disable-pip-version-check --no-cache-dir --retries 0 --target installed"
    script = (
        f"python3 pip.whl/pip install {options} --index-url https://user:$PIP_TOKEN@{sandboxes.host}/simple/ tiny && "
        "PYTHONPATH=installed python3 -c 'import tiny; print(tiny.x)'"
    )
    assert text_of(sandboxes.run(script, timeout_s=90)) == "1\n"


def test_npm_installs_from_a_private_registry(sandboxes: SecretSandboxd) -> None:
    with SandboxClient(sandboxes.client_socket) as client:
        client.open("acme", "node", SessionSpec(image=NODE_IMAGE, secrets=("NPM_TOKEN",)), policy=TERMS)
    registry = f"{sandboxes.host}/npm/"
    script = (
        f"printf '%s\\n' 'registry=https://{registry}' '//{registry}:_authToken=${{NPM_TOKEN}}' > .npmrc; echo '{{}}' > "
        "package.json; npm install --no-audit --no-fund --no-update-notifier --loglevel=error tiny && "
        "node -p 'require(\"tiny\")' && cat .npmrc"
    )
    ran = sandboxes.run(script, "acme:node", 120)
    assert "\ntiny\n" in text_of(ran), text_of(ran)
    assert TOKEN not in text_of(ran)


def test_httpx_and_the_openai_client_use_a_secret(sandboxes: SecretSandboxd) -> None:
    install_python(sandboxes)
    script = f"""
import os, sys
sys.path.insert(0, "packages")
import httpx, openai
with httpx.Client() as client:
    for _ in range(2):
        print(client.get("https://{sandboxes.host}/echo", headers={{"Authorization": "Bearer " + os.environ["API_TOKEN"]}}).text)
client = openai.OpenAI(base_url="https://{sandboxes.host}/v1")
messages = [{{"role": "user", "content": "hi"}}]
print(client.chat.completions.create(model="m", messages=messages).choices[0].message.content)
for chunk in client.chat.completions.create(model="m", messages=messages, stream=True):
    print(chunk.choices[0].delta.content, end=" ")
"""
    sandboxes.write("clients.py", script.encode())
    output = text_of(sandboxes.run("python3 clients.py", timeout_s=90))
    assert output.count("Bearer " + "*" * len(TOKEN)) == 2, output
    assert output.endswith("hello\nhel lo "), output


def test_a_program_sees_only_placeholders(sandboxes: SecretSandboxd) -> None:
    script = "env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; grep -ral canary /workspace /tmp /output /skills"
    output = text_of(sandboxes.run(script))
    assert f"GIT_TOKEN={build_placeholder('acme', 's1', 'GIT_TOKEN')}\n" in output
    assert "canary" not in output


def test_a_revoked_secret_stops_working_on_new_and_open_connections(sandboxes: SecretSandboxd) -> None:
    script = f"""
import http.client, os, sys, time
connection = http.client.HTTPSConnection("127.0.0.1", 3128)
connection.set_tunnel("site.example", {sandboxes.port})
headers = {{"Authorization": "Bearer " + os.environ["API_TOKEN"]}}
for _ in range(100):
    try:
        connection.request("GET", "/echo", headers=headers)
        reply = connection.getresponse()
        reply.read()
        print(reply.status, flush=True)
    except (OSError, http.client.HTTPException):
        print("cut", flush=True)
        sys.exit()
    time.sleep(0.1)
"""
    sandboxes.write("kept.py", script.encode())
    value = sandboxes.values["API_TOKEN"]
    outputs: list[str] = []
    running_script = threading.Thread(
        target=lambda: outputs.append(text_of(sandboxes.run("python3 kept.py 2>&1 | tee kept.txt")))
    )
    running_script.start()
    wait_until(sandboxes.has_answered, SOON_S, "no request was answered")
    sandboxes.values["API_TOKEN"] = None
    sandboxes.exchange()
    running_script.join()
    lines = outputs[0].split()
    assert (lines[0], lines[-1], set(lines[1:-1]) <= {"200"}) == ("200", "cut", True), outputs
    fetch = f"python3 -c \"import urllib.request as u, os; print(u.urlopen(u.Request('https://{sandboxes.host}/echo', headers={{'Authorization': 'Bearer ' + os.environ['API_TOKEN']}})).status)\" 2>&1 | tail -1"
    assert "401" in text_of(sandboxes.run(fetch))
    sandboxes.values["API_TOKEN"] = value
    sandboxes.exchange()
    assert text_of(sandboxes.run(fetch)) == "200\n"
