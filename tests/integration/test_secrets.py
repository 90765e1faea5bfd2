"""The whole life of a secret on a stack: stored by a command, used by a run's program, audited, revoked, and found
nowhere.
"""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from docker import APIClient
from pydantic import SecretStr

from tests.attacks.test_secrets import find_secret
from tests.integration.test_canary import command_lines, dump, logs
from tests.support.cli.command_server import run_toolcrew
from tests.support.sandboxd.secret_harness import VALUE, Site, open_secret_site
from tests.support.stack.stack import Stack, open_stack
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.secrets import build_placeholder
from toolcrew.contract.session_spec import SandboxOptions
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.tenancy import SandboxPolicy, TenantPolicy
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.store.audit import Audit, AuditEntry
from toolcrew.store.connection import open_redis
from toolcrew.store.tenants import RedisTenants
from toolcrew.workers.egress.authority import Authority

pytestmark = pytest.mark.stack
SECRET = "the-secret-of-this-deployment"
_FETCH = """
import http.client, os, time
connection = http.client.HTTPSConnection("127.0.0.1", 3128)
connection.set_tunnel("localhost", {port})
for _ in range({times}):
    try:
        connection.request("GET", "/", headers={{"Authorization": "Bearer " + os.environ["TOKEN"]}})
        print(connection.getresponse().read().decode(), flush=True)
    except (OSError, http.client.HTTPException):
        print("cut", flush=True)
        break
    time.sleep(0.1)
"""


@dataclass
class SecretStack:
    stack: Stack
    site: Site

    @property
    def settings(self) -> OrchestratorSettings:
        return OrchestratorSettings(redis_url=SecretStr(self.stack.redis_url), secret=SecretStr(SECRET))

    def command(self, *arguments: str, text: str = "") -> str:
        environment = {"TOOLCREW_REDIS_URL": self.stack.redis_url, "TOOLCREW_SECRET": SECRET}
        done = run_toolcrew(self.stack.footprint, "secrets", *arguments, environment=environment, text=text)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def fetch(self, times: int = 1) -> str:
        return f"cat > fetch.py <<'END'\n{_FETCH.format(port=self.site.port, times=times)}\nEND\npython3 fetch.py"

    async def uses(self) -> list[AuditEntry]:
        client = open_redis(self.settings.broker())
        try:
            page = await Audit(client, "default").read(tenant="default", actions=("secret.use",))
            return list(page.entries)
        finally:
            await client.aclose()


@pytest.fixture(scope="module")
def secret_stack(engine: APIClient) -> Iterator[SecretStack]:
    authority = Authority()
    with open_secret_site(context=authority.find_context("localhost")) as site, tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "authorities.pem"
        bundle.write_bytes(authority.build_bundle())
        rules = {"hosts": ["localhost"], "private_hosts": ["localhost"], "ports": [site.port]}
        classes = {"fetching": {"network": "egress", "egress": rules}}
        environment = {
            "TOOLCREW_SECRET": SECRET,
            "TOOLCREW_TENANT_CLASSES": json.dumps(classes),
            "SSL_CERT_FILE": str(bundle),
        }
        with open_stack(engine, environment) as stack:
            yield SecretStack(stack, site)


async def set_class(secret_stack: SecretStack, secrets: tuple[str, ...] | None = None) -> None:
    client = open_redis(secret_stack.settings.broker())
    try:
        tenants = RedisTenants(client, "default", secret_stack.settings.broker().signing_keys())
        await tenants.replace("default", TenantPolicy(sandbox=SandboxPolicy(tenant_class="fetching", secrets=secrets)))
    finally:
        await client.aclose()


async def test_a_secret_is_used_by_a_run_audited_revoked_and_never_exposed(secret_stack: SecretStack) -> None:
    await set_class(secret_stack)
    reply = secret_stack.command("set", "TOKEN", "--host", f"localhost:{secret_stack.site.port}", text=VALUE)
    async with ToolClient.connect(settings=secret_stack.settings) as client:
        async with await client.open_session(options=SandboxOptions(secrets=("TOKEN",))) as session:
            script = ScriptedModel([Calls([("bash_tool", {"command": secret_stack.fetch()})]), "done"])
            result = await client.run("Fetch it.", session=session, model=script, dialect="native")
            outputs = [str(result), str(await session.call("bash_tool", {"command": "env; cat /proc/self/environ"}))]
            assert f"Bearer {VALUE}".encode() in secret_stack.site.requests[0]
            assert "tcs_placeholder_" in outputs[1]
            [use] = await wait_until_async(secret_stack.uses, SOON_S, "no use was audited")
            assert use.target == "TOKEN"
            # The entry is written before or after the answer, which holds the secret, has come.
            details = {name: text for name, text in use.details.items() if name != "masked_responses"}
            assert details == {
                "session": session.id,
                "run": result.run,
                "host": f"localhost:{secret_stack.site.port}",
                "requests": "1",
            }
            running = asyncio.ensure_future(session.call("bash_tool", {"command": secret_stack.fetch(times=150)}))
            await wait_until_async(
                lambda: len(secret_stack.site.requests) > 2, SOON_S, "the kept connection carries no request"
            )
            reply += await asyncio.to_thread(secret_stack.command, "revoke", "TOKEN")
            reply += await asyncio.to_thread(secret_stack.command, "list")
            ended = await running
            outputs.append(str(ended))
            assert ended.output is not None
            assert ended.output.strip().endswith("cut")
            again = await session.call("bash_tool", {"command": secret_stack.fetch()})
            outputs.append(str(again))
            assert VALUE.encode() not in secret_stack.site.requests[-1]
            checkpoint = await session.checkpoint()
            await session.close()
        with secret_stack.stack.open_redis() as store:
            everywhere = b"\n".join([dump(store), logs(secret_stack.stack), command_lines(), reply.encode()])
        state = b"\n".join(
            path.read_bytes()
            for path in secret_stack.stack.footprint.folder.rglob("*")
            if path.is_file() and not path.is_symlink()
        )
        assert checkpoint.id in "".join(str(path) for path in secret_stack.stack.footprint.folder.rglob("*"))
    assert find_secret(everywhere + "".join(outputs).encode()) == []
    assert VALUE.encode() not in state


async def test_a_line_of_a_batch_uses_the_secret_that_it_names(secret_stack: SecretStack) -> None:
    await set_class(secret_stack)
    secret_stack.command("set", "BATCH_TOKEN", "--host", f"localhost:{secret_stack.site.port}", text=VALUE)
    fetch = secret_stack.fetch().replace('"TOKEN"', '"BATCH_TOKEN"')
    before = len(secret_stack.site.requests)
    line = {
        "id": "a",
        "tool": "bash_tool",
        "arguments": {"command": fetch},
        "secrets": ["BATCH_TOKEN"],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in.jsonl").write_text(json.dumps(line) + "\n")
        done = run_toolcrew(
            secret_stack.stack.footprint,
            *("batches", "submit", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl")),
            environment={"TOOLCREW_REDIS_URL": secret_stack.stack.redis_url, "TOOLCREW_SECRET": SECRET},
        )
        assert done.returncode == 0, done.stderr
        row = json.loads((folder / "out.jsonl").read_text())
    assert row["error"] is None, row
    assert [f"Bearer {VALUE}".encode() in request for request in secret_stack.site.requests[before:]] == [True]
    assert VALUE not in json.dumps(row)


async def test_a_session_gets_only_existing_secrets_that_the_policy_allows(secret_stack: SecretStack) -> None:
    secret_stack.command("set", "GIVEN", "--host", "localhost", text=VALUE)
    async with ToolClient.connect(settings=secret_stack.settings) as client:
        await set_class(secret_stack, ("GIVEN", "MISSING"))
        for secret in ("MISSING", "OTHER"):
            with pytest.raises(ToolFailure) as refused:
                await client.open_session(options=SandboxOptions(secrets=(secret,)))
            assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
        options = SandboxOptions(secrets=("GIVEN",))
        async with await client.open_session(options=options) as session:
            assert build_placeholder("default", session.id, "GIVEN") in str(
                await session.call("bash_tool", {"command": "echo $GIVEN"})
            )
            checkpoint = await session.checkpoint()
            [child] = await session.fork()
            async with child:
                assert build_placeholder("default", child.id, "GIVEN") in str(
                    await child.call("bash_tool", {"command": "echo $GIVEN"})
                )
        async with await client.open_session(restore=checkpoint, options=options) as session:
            assert build_placeholder("default", session.id, "GIVEN") in str(
                await session.call("bash_tool", {"command": "echo $GIVEN"})
            )
        async with await client.open_session(restore=checkpoint) as session:
            answer = await session.call("bash_tool", {"command": 'echo "<$GIVEN$SSL_CERT_FILE>"'})
            assert "<>" in str(answer)
