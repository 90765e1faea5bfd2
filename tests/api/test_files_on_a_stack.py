"""Workspaces and artifacts of batches that other orchestrators run: uploads, git bundles and locations of the store,
on real sandboxes.
"""

import asyncio
import gzip
import io
import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cli.command_server import run_toolcrew
from tests.support.sandboxd.archives import build_tar
from tests.support.stack.api_stack import ApiStack, read_events, read_until, store_settings
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.file_ids import MAX_WORKSPACE_BYTES

pytestmark = pytest.mark.stack

MIB = 1024 * 1024
LINES = {"Content-Type": "application/jsonl"}


def files_in(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return {entry.name: opened.extractfile(entry).read() for entry in opened if entry.isreg()}  # type: ignore[union-attr]


def call(name: str, command: str, **fields: Any) -> dict[str, Any]:
    return {"id": name, "tool": "bash_tool", "arguments": {"command": command}, **fields}


async def upload(client: httpx.AsyncClient, content: bytes) -> str:
    answer = await client.post("/v1/files", content=content)
    assert answer.status_code == 201, answer.text
    assert answer.json()["bytes"] == len(content)
    return str(answer.json()["id"])


async def submit(client: httpx.AsyncClient, *lines: dict[str, Any]) -> httpx.Response:
    return await client.post(
        "/v1/batches", content="\n".join(json.dumps(line) for line in lines), headers=LINES, params={"retries": 0}
    )


async def rows_of(client: httpx.AsyncClient, *lines: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Run a batch of these lines and return its rows by id."""
    submitted = await submit(client, *lines)
    assert submitted.status_code == 201, submitted.text
    path = submitted.headers["location"]
    await read_until(client, path, "status", "completed")
    rows = [json.loads(line) for line in (await client.get(f"{path}/results")).text.splitlines()]
    return {row["custom_id"]: row for row in rows}


def output_of(row: dict[str, Any]) -> str:
    assert row["error"] is None, row
    return str(row["response"]["body"]["output"])


async def test_an_uploaded_archive_becomes_the_workspace_and_artifacts_can_be_downloaded(api_stack: ApiStack) -> None:
    archive = build_tar(("src/a.txt", b"from the archive"))
    async with api_stack.client() as client, api_stack.client(replica=1) as other:
        file = await upload(client, gzip.compress(archive))
        command = "cat src/a.txt; mkdir -p out; echo made >out/b.txt; ln -s ../src/a.txt out/link; ln -s /etc/passwd out/leads"
        rows = await rows_of(
            other,
            call("one", command, workspace=file, artifacts=["out/**", "none/*"]),
            call("two", "ls", workspace=file),
        )
        assert output_of(rows["one"]).startswith("from the archive")
        assert output_of(rows["two"]).strip() == "src"
        body = rows["one"]["response"]["body"]
        assert body["artifacts"] == ["out/b.txt", "out/link"]
        assert len(body["artifacts_missing"]) == 2
        content = await client.get(f"/v1/files/{body['artifacts_file']}/content")
        assert files_in(content.content) == {"out/b.txt": b"made\n", "out/link": b"from the archive"}
        assert content.headers["content-length"] == str(len(content.content))
        # One item starts with the artifact of another item.
        again = await rows_of(client, call("three", "cat out/b.txt", workspace=body["artifacts_file"]))
        assert output_of(again["three"]).strip() == "made"


async def test_a_run_has_a_workspace_and_artifacts(api_stack: ApiStack) -> None:
    async with api_stack.client() as client, api_stack.client("rival") as rival:
        file = await upload(client, build_tar(("src/a.txt", b"from the archive\n")))
        run = {"instruction": "[item carries] act", "workspace": file, "artifacts": ["out.txt", "none/*"]}
        started = await client.post("/v1/runs", json=run)
        assert started.status_code == 202, started.text
        path = started.headers["location"]
        events = await read_events(client, f"{path}/events")
        ended = (await client.get(path)).json()
        assert (ended["state"], ended["answer"], ended["artifacts"]) == ("succeeded", "from the archive", ["out.txt"])
        assert len(ended["artifacts_missing"]) == 1
        assert events[-1]["data"]["artifacts_file"] == ended["artifacts_file"]
        content = await client.get(f"/v1/files/{ended['artifacts_file']}/content")
        assert files_in(content.content) == {"out.txt": b"from the archive\n"}

        refused = await rival.post("/v1/runs", json=run)
        assert (refused.status_code, refused.json()["code"]) == (404, "FILE_NOT_FOUND")
        for wrong in ({"workspace": "/etc"}, {"artifacts": ["../up"]}, {"restore": "c"}):
            refused = await client.post("/v1/runs", json={**run, **wrong})
            assert (refused.status_code, refused.json()["code"]) == (422, "INVALID_ARGUMENTS"), wrong


async def test_a_store_location_is_a_workspace_for_its_own_tenant_only(api_stack: ApiStack) -> None:
    for folder in ("acme", "rival", "@shared"):
        (api_stack.store / folder / "in").mkdir(parents=True, exist_ok=True)
        (api_stack.store / folder / "in" / "it.tar").write_bytes(build_tar(("owner", folder.encode())))
    os.symlink("../../rival/in/it.tar", api_stack.store / "acme" / "in" / "link.tar")
    root = f"file://{api_stack.store}"
    async with api_stack.client() as client:
        rows = await rows_of(
            client,
            call("own", "cat owner", workspace=f"{root}/acme/in/it.tar"),
            call("shared", "cat owner", workspace=f"{root}/@shared/in/it.tar"),
            call("link", "cat owner", workspace=f"{root}/acme/in/link.tar"),
            call("none", "cat owner", workspace=f"{root}/acme/in/none.tar"),
        )
        assert (output_of(rows["own"]), output_of(rows["shared"])) == ("acme", "@shared")
        for name in ("link", "none"):
            assert (rows[name]["error"]["code"], rows[name]["error"]["kind"]) == ("FILE_NOT_FOUND", "input")
        for place in (
            "rival/in/it.tar",
            "acme/../rival/in/it.tar",
            "acme//in/it.tar",
            "acme",
            "../etc/passwd",
            "@shared",
        ):
            refused = await submit(client, call("bad", "ls", workspace=f"{root}/{place}"))
            assert (refused.status_code, refused.json()["code"]) == (422, "INVALID_ARGUMENTS"), place
        for place in (
            "s3://bucket/acme/it.tar",
            "file:///etc/passwd",
            "https://example.org/it.tar",
            f"{root}x/acme/it.tar",
        ):
            refused = await submit(client, call("bad", "ls", workspace=place))
            assert "the file is not in the store" in refused.text, place


async def test_a_file_of_another_tenant_is_not_found(api_stack: ApiStack) -> None:
    async with api_stack.client() as client, api_stack.client("rival") as rival:
        file = await upload(client, build_tar(("secret", b"of acme")))
        for answer in (
            await rival.get(f"/v1/files/{file}"),
            await rival.get(f"/v1/files/{file}/content"),
            await rival.delete(f"/v1/files/{file}"),
        ):
            assert (answer.status_code, answer.json()["code"]) == (404, "FILE_NOT_FOUND")
        assert file not in (await rival.get("/v1/files")).text
        refused = await submit(rival, call("one", "ls", workspace=file))
        assert refused.status_code == 422
        assert f"line 1: tenant rival has no file {file}" in refused.text
        assert (await client.get(f"/v1/files/{file}")).status_code == 200
        assert (await client.delete(f"/v1/files/{file}")).status_code == 204
        assert (await client.get(f"/v1/files/{file}")).status_code == 404


async def test_a_hostile_archive_fails_only_its_own_item(api_stack: ApiStack) -> None:
    async with api_stack.client() as client:
        bomb = io.BytesIO()
        with gzip.open(bomb, "wb", compresslevel=9) as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
            entry = tarfile.TarInfo("zeros")
            entry.size = 600 * MIB
            archive.addfile(entry, _Zeros(entry.size))  # type: ignore[arg-type]
        assert len(bomb.getvalue()) < MIB
        names = {
            "bomb": bomb.getvalue(),
            "up": build_tar(("../up", b"x")),
            "absolute": build_tar(("/etc/absolute", b"x")),
            "cut": gzip.compress(build_tar(("a", os.urandom(MIB))))[: MIB // 2],
            "link": build_tar(("out", "/tmp"), ("out/escaped", b"x")),
        }
        files = {name: await upload(client, content) for name, content in names.items()}
        rows = await rows_of(
            client, *(call(name, "ls -l; cat /tmp/escaped", workspace=file) for name, file in files.items())
        )
        fields = {name: row["error"]["code"] if row["error"] else None for name, row in rows.items()}
        assert fields["bomb"] == "NO_SPACE", rows["bomb"]
        assert (fields["up"], fields["absolute"]) == ("PATH_NOT_ALLOWED", "PATH_NOT_ALLOWED")
        assert fields["cut"] == "INVALID_ARGUMENTS"
        assert {rows[name]["error"]["kind"] for name in ("up", "absolute", "cut")} == {"input"}
        # tar follows no link of the archive.
        assert fields["link"] is not None


async def declare(api_stack: ApiStack, length: int) -> bytes:
    """Return the response to an upload that declares `length` bytes and sends nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api_stack.apis[0].port)
    lines = [
        "POST /v1/files HTTP/1.1",
        "Host: api",
        f"Authorization: Bearer {api_stack.keys['acme']}",
        f"Content-Length: {length}",
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    async with asyncio.timeout(SOON_S):
        answer = await reader.readuntil(b"nearest")
    writer.close()
    return answer


async def test_files_above_the_size_limit_are_refused_with_the_limit(api_stack: ApiStack) -> None:
    async with api_stack.client() as client:
        refused_early = await declare(api_stack, MAX_WORKSPACE_BYTES + 1)
        assert b" 413 " in refused_early.splitlines()[0]
        assert f"at most {MAX_WORKSPACE_BYTES} bytes".encode() in refused_early
        before = (await client.get("/v1/files", params={"limit": 200})).json()["data"]
        refused = await client.post("/v1/files", content=b"no archive at all")
        assert (refused.status_code, refused.json()["code"]) == (422, "INVALID_ARGUMENTS")
        assert (await client.get("/v1/files", params={"limit": 200})).json()["data"] == before
        (api_stack.store / "acme" / "in").mkdir(parents=True, exist_ok=True)
        with (api_stack.store / "acme" / "in" / "large.tar").open("wb") as file:
            file.truncate(MAX_WORKSPACE_BYTES + 1)
        rows = await rows_of(client, call("in", "ls", workspace=f"file://{api_stack.store}/acme/in/large.tar"))
        assert (rows["in"]["error"]["code"], rows["in"]["error"]["kind"]) == ("FILE_TOO_LARGE", "input")
        assert str(MAX_WORKSPACE_BYTES) in rows["in"]["error"]["message"]


async def test_a_detached_cli_batch_uploads_its_folders_and_exports_its_artifacts(
    api_stack: ApiStack, tmp_path: Path
) -> None:
    (tmp_path / "repo" / "src").mkdir(parents=True)
    (tmp_path / "repo" / "src" / "a.txt").write_text("of the submitter")
    (tmp_path / "it.tar.gz").write_bytes(gzip.compress(build_tar(("a.txt", b"packed"))))
    lines = [
        call("One", "cp src/a.txt out.txt", workspace="repo", artifacts=["out.txt"]),
        call("two", "cat src/a.txt", workspace="./repo"),
        call("three", "cat a.txt", workspace="it.tar.gz"),
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    environment = {"TOOLCREW_REDIS_URL": api_stack.stack.redis_url, **store_settings(api_stack.store)}

    async def toolcrew(*arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
        return await asyncio.to_thread(
            run_toolcrew,
            api_stack.stack.footprint,
            *("batches", *arguments, "--tenant", "acme"),
            environment={**environment, **more},
        )

    refused = await toolcrew("submit", str(tmp_path / "in.jsonl"), "--detach", TOOLCREW_WORKSPACE_STORE="")
    assert refused.returncode == 1
    assert "set TOOLCREW_WORKSPACE_STORE" in refused.stderr
    async with api_stack.client() as client:
        before = {file["id"] for file in (await client.get("/v1/files", params={"limit": 200})).json()["data"]}
        done = await toolcrew("submit", str(tmp_path / "in.jsonl"), "--detach", "--id", "carried")
        assert done.returncode == 0, done.stderr
        after = {file["id"] for file in (await client.get("/v1/files", params={"limit": 200})).json()["data"]}
        assert len({file for file in after - before if file.startswith("file-")}) == 2
        await read_until(client, "/v1/batches/carried", "status", "completed")
    exported = await toolcrew("export", "carried", "--artifacts", str(tmp_path / "artifacts"))
    assert exported.returncode == 0, exported.stderr
    rows = {row["custom_id"]: row for row in map(json.loads, exported.stdout.splitlines())}
    assert (output_of(rows["two"]), output_of(rows["three"])) == ("of the submitter", "packed")
    assert [path.read_text() for path in (tmp_path / "artifacts").glob("*/out.txt")] == ["of the submitter"]


class _Zeros(io.RawIOBase):
    """A stream of zeros that needs no memory."""

    def __init__(self, size: int) -> None:
        self._left = size

    def read(self, size: int = -1) -> bytes:
        count = min(self._left, size)
        self._left -= count
        return bytes(count)
