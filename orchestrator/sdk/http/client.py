"""Synchronous client of the HTTP API. `scripts/reference.py` makes client.py, the synchronous one, from this file."""

import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import httpx
from pydantic import BaseModel

from toolcrew.contract.calls import DEFAULT_TIMEOUT_S, ExecResult, ToolResult
from toolcrew.contract.errors import ApiUnavailable, ConfigError, ToolcrewError
from toolcrew.orchestrator.sdk.http.connection import (
    MAX_ANSWER_BYTES,
    MAX_ERROR_BYTES,
    TRIES,
    Ask,
    EventReader,
    ServerEvent,
    build_error,
    build_lost,
    build_options,
    build_too_large,
    keep_error,
    keepalive,
    parse,
    parse_object,
    pause_after,
    replace_workspaces,
    run_fields,
    segment,
    with_key,
)
from toolcrew.orchestrator.sdk.http.files import SessionFiles
from toolcrew.orchestrator.sdk.http.ports import Ports
from toolcrew.orchestrator.sdk.http.processes import Processes

if TYPE_CHECKING:
    from toolcrew.contract.access_views import KeyView, Page, SkillView, ToolView
    from toolcrew.contract.model_endpoints import EndpointView
    from toolcrew.contract.run_spec import ItemEnvironment, RunBody
    from toolcrew.contract.run_views import BatchOptions, BatchStatus, DurableRunState, RunView, SubmittedBatch
    from toolcrew.contract.session_spec import SandboxOptions
    from toolcrew.contract.session_views import By, Checkpoint, OpenSession, SessionView, StoredFile, UsageReport
    from toolcrew.contract.webhooks import Webhook

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
OnOutput = Callable[[str, str], object]
"""Gets a stream's name and a piece of its text."""


class Client:
    """A tenant's client of the HTTP API.

        with Client() as client, client.sessions.open() as session:
            print((session.run("make test")).output)

    It needs the address of the API (TOOLCREW_URL) and an API key (TOOLCREW_API_KEY). It raises the same errors as
    ToolClient, which connects to the pool's Redis instead, and ApiUnavailable when the API does not answer. A request
    without a second effect is sent again after a lost connection, and every request while the service asks to wait.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, *, tenant: str | None = None) -> None:
        """Create the client. Nothing is sent yet. `tenant`: the tenant to act for, with an operator's key; None: the
        tenant of the key. Raises ConfigError when the address or the key is missing.
        """
        self._tenant = tenant
        options = build_options(url, api_key, tenant)
        self.url = str(options["base_url"])
        self.headers: Mapping[str, str] = options["headers"]
        self._http = httpx.Client(**options, transport=httpx.HTTPTransport(socket_options=keepalive()))
        self.sessions = Sessions(self)
        self.runs = Runs(self)
        self.batches = Batches(self)
        self.files = Files(self)
        """Uploads, which runs and batches take as their first files, and artifacts."""
        self.calls = Calls(self)
        self.skills = Skills(self)
        self.approvals = Approvals(self)

    def close(self) -> None:
        """Close the connections. Sessions and runs stay open."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def key(self) -> "KeyView":
        """Return the API key of this client with its tenant and role, without its text."""
        from toolcrew.contract.access_views import KeyView

        return self.get(KeyView, "/v1/key")

    def tools(self) -> "list[ToolView]":
        """Return the tools that the workers publish, by name, with their states for the tenant."""
        from toolcrew.contract.access_views import Page, ToolView

        return [tool for tool in self.pages(Page[ToolView], "/v1/tools")]

    def models(self) -> "list[EndpointView]":
        """Return the model endpoints that the tenant's runs may use."""
        from toolcrew.contract.access_views import Page
        from toolcrew.contract.model_endpoints import EndpointView

        return [model for model in self.pages(Page[EndpointView], "/v1/models")]

    def delete_checkpoint(self, checkpoint: "Checkpoint | str") -> None:
        """Delete a checkpoint, given as object or id. Raises ToolFailure(FILE_NOT_FOUND)."""
        name = checkpoint if isinstance(checkpoint, str) else checkpoint.id
        self.send(Ask("DELETE", f"/v1/checkpoints/{segment(name)}", wait_s=OPEN_S))

    def usage(self, start: datetime | None = None, end: datetime | None = None, *, by: "By" = "day") -> "UsageReport":
        """Return what the tenant used by hour or day in UTC, and its budgets. `start` None: 30 days before `end`."""
        from toolcrew.contract.session_views import UsageReport

        tenant = self._tenant or (self.key()).tenant
        times = {"from": start and start.isoformat(), "to": end and end.isoformat()}
        return self.get(UsageReport, f"/v1/tenants/{segment(tenant)}/usage", {**times, "by": by})

    def get(self, kind: type[M], path: str, params: Mapping[str, Any] | None = None) -> M:
        """Return the record at an address of the API."""
        return parse(kind, self.send(Ask("GET", path, repeats=True, params=params)))

    def pages(self, kind: "type[Page[T]]", path: str, params: Mapping[str, Any] | None = None) -> Generator[T]:
        """Yield the items of a list from all its pages."""
        cursor: str | None = None
        while True:
            page = self.get(kind, path, {**(params or {}), "cursor": cursor, "limit": 200})
            for item in page.data:
                yield item
            cursor = page.next_cursor
            if cursor is None:
                return

    def send(self, ask: Ask) -> bytes:
        """Send a request and return the content of its answer. Raises the errors of the class."""
        content = bytearray()
        with self.stream(ask) as response:
            for piece in response.iter_bytes():
                content += piece
                if len(content) > MAX_ANSWER_BYTES:
                    raise build_too_large(self.url)
        return bytes(content)

    @contextmanager
    def stream(self, ask: Ask) -> Iterator[httpx.Response]:
        """Send a request and yield its successful answer, whose content arrives during the block. A connection that is
        lost inside the block raises ApiUnavailable.
        """
        response = self._begin(ask)
        try:
            yield response
        except httpx.TransportError as error:
            raise build_lost(error, self.url) from error
        finally:
            response.close()

    def _begin(self, ask: Ask) -> httpx.Response:
        attempt = 0
        while True:
            attempt += 1
            problem: httpx.Response | httpx.TransportError
            try:
                request = self._http.build_request(ask.method, ask.path, **ask.options())
                response = self._http.send(request, stream=True)
                if response.is_success:
                    return response
                problem = self._read_error(response)
            except httpx.TransportError as error:
                problem = error
            pause_s = pause_after(ask, attempt, problem)
            if pause_s is not None:
                time.sleep(pause_s)
            elif isinstance(problem, httpx.Response):
                raise build_error(problem)
            else:
                raise build_lost(problem, self.url) from problem

    def _read_error(self, response: httpx.Response) -> httpx.Response:
        content = bytearray()
        try:
            for piece in response.iter_bytes():
                content += piece
                if len(content) > MAX_ERROR_BYTES:
                    break
        finally:
            response.close()
        return keep_error(response, bytes(content))

    def follow(self, ask: Ask) -> Generator[ServerEvent]:
        """Send a request and yield the events of its answer."""
        reader = EventReader()
        with self.stream(ask) as response:
            for piece in response.iter_bytes():
                for event in reader.feed(piece):
                    yield event


class Sessions:
    """The sessions of the tenant."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def open(
        self,
        workspace: Path | str | None = None,
        *,
        image: str | None = None,
        ttl_s: float | None = None,
        restore: "Checkpoint | str | None" = None,
        network: Literal["none", "egress"] | None = None,
        options: "SandboxOptions | None" = None,
        tool_config: Mapping[str, Mapping[str, Any]] | None = None,
        key: str | None = None,
    ) -> "Session":
        """Open a session with its own sandbox. `close` removes the sandbox, and so do `ttl_s` seconds without a call.

        `workspace`: a local folder whose content, at most 64 MiB, is copied to /workspace. `restore`: a checkpoint, or
        its id. `options`: sizes and user of the sandbox. None: the values of the tenant's class.

        The same `key` and options return the same session for a day after the last use of the key, no matter which
        program asks. SESSION_NOT_FOUND after the session has ended. Without a `workspace`, because the session of a key
        may already have changed its files.
        """
        if key is not None and workspace is not None:
            raise ConfigError("a session with a key is opened without a workspace: copy it with `import_folder`")
        body = {
            **(options.model_dump(mode="json") if options is not None else {}),
            "image": image,
            "ttl_s": ttl_s,
            "restore": restore if restore is None or isinstance(restore, str) else restore.id,
            "network": network,
            "tool_config": tool_config,
        }
        content = {name: value for name, value in body.items() if value is not None}
        answer = self._client.send(with_key(Ask("POST", "/v1/sessions", body=content, wait_s=OPEN_S), key))
        session = Session(self._client, parse_object(answer)["id"])
        if workspace is not None:
            try:
                session.import_folder(workspace)
            except BaseException:
                with suppress(ToolcrewError):
                    session.close()
                raise
        return session

    def get(self, session: str) -> "Session":
        """Return a handle of an open session. Nothing is sent. The end of a `with` block closes the session."""
        return Session(self._client, session)

    def list(self) -> "Generator[OpenSession]":
        """Yield the open sessions, the newest first."""
        from toolcrew.contract.access_views import Page
        from toolcrew.contract.session_views import OpenSession

        return self._client.pages(Page[OpenSession], "/v1/sessions")


class Session:
    """Handle of an open session, which is a sandbox with its files. `run` and `call` raise nothing when a tool fails;
    the other methods raise ToolFailure.
    """

    def __init__(self, client: Client, session: str) -> None:
        self._client = client
        self._path = f"/v1/sessions/{segment(session)}"
        self.id = session
        self.files = SessionFiles(client, session)
        self.processes = Processes(client, self._path)
        self.ports = Ports(client, self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the session. Returns after its sandbox is removed."""
        self._client.send(Ask("DELETE", self._path, wait_s=OPEN_S))

    def info(self) -> "SessionView":
        """Return the session with its host, its sandbox and what it used."""
        from toolcrew.contract.session_views import SessionView

        return self._client.get(SessionView, self._path)

    def set_ttl(self, seconds: float) -> None:
        """Let the session live for `seconds` without a call from now on, at most a day."""
        self._client.send(Ask("PATCH", self._path, repeats=True, body={"ttl_s": seconds}))

    def run(self, command: str, *, timeout_s: float | None = None, on_output: OnOutput | None = None) -> ToolResult:
        """Run a shell command with bash_tool. Folder and variables stay for the next command."""
        return self.call("bash_tool", {"command": command}, timeout_s=timeout_s, on_output=on_output)

    def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        call_id: str | None = None,
        on_output: OnOutput | None = None,
        on_waiting: OnOutput | None = None,
    ) -> ToolResult:
        """Run a tool once and return its result, also when the call fails.

        `on_output` gets pieces of output (stream, text) while the tool runs, if the tool streams output. `on_waiting`
        gets (reason, sentence) while the call has no slot. The call is killed when this program ends or loses the
        connection. With a `call_id` it goes on: the same call with the same `call_id`, also of another program, waits
        for it or returns its result, which is stored for an hour (RESULT_EXPIRED after that).
        """
        body = {"name": name, "arguments": arguments, "timeout_s": timeout_s, "call_id": call_id}
        ask = Ask(
            "POST",
            f"{self._path}/calls",
            repeats=call_id is not None,
            body=body,
            headers={"Accept": "text/event-stream"},
        )
        for attempt in range(1, TRIES if call_id is not None else 1):
            try:
                return self._follow_call(ask, on_output, on_waiting)
            except ApiUnavailable:
                # The connection was lost while the call ran. The call goes on.
                time.sleep(2.0 ** (attempt - 1))
        return self._follow_call(ask, on_output, on_waiting)

    def _follow_call(self, ask: Ask, on_output: OnOutput | None, on_waiting: OnOutput | None) -> ToolResult:
        with closing(self._client.follow(ask)) as events:
            for event in events:
                fields = parse_object(event.data.encode())
                if event.event == "result":
                    return parse(ToolResult, event.data.encode())
                if event.event == "output" and on_output is not None:
                    _tell(on_output, fields["stream"], fields["text"])
                if event.event == "waiting" and on_waiting is not None:
                    _tell(on_waiting, fields["reason"], fields["message"])
        raise ApiUnavailable(
            f"the connection to {self._client.url} ended before the result of the call: the call was killed, or its "
            "outcome is unknown"
        )

    def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        key: str | None = None,
    ) -> ExecResult:
        """Run a program without a shell, and return its output as bytes. At the limit it gets SIGTERM, and a moment
        later SIGKILL. `stdin`: at most 1 MiB. Raises ToolFailure when the program cannot be started.

        With a `key` the program runs once: the same request with the same `key` waits for it or returns its result,
        which is stored for a day, and above 1 MiB for 20 s.
        """
        from toolcrew.contract.session_views import ExecView, encode

        body = {"argv": list(argv), "stdin": encode(stdin), "env": dict(env or {}), "cwd": cwd, "timeout_s": timeout_s}
        ask = Ask("POST", f"{self._path}/exec", body=body, wait_s=timeout_s + QUEUE_S)
        return parse(ExecView, self._client.send(with_key(ask, key) if key is not None else ask))

    def checkpoint(self) -> "Checkpoint":
        """Store the files, long outputs and shell state. The checkpoint outlives the session."""
        from toolcrew.contract.session_views import Checkpoint

        return parse(Checkpoint, self._client.send(Ask("POST", f"{self._path}/checkpoints", wait_s=OPEN_S)))

    def fork(self, n: int = 1, *, leave_jobs: bool = False) -> "Sequence[Session]":
        """Return `n` new sessions with the files and the shell state of this one, which continues."""
        from toolcrew.contract.session_views import Forks

        body = {"n": n, "leave_jobs": leave_jobs}
        answer = self._client.send(Ask("POST", f"{self._path}/fork", body=body, wait_s=OPEN_S))
        return [Session(self._client, fork.id) for fork in parse(Forks, answer).sessions]

    def expose(self, port: int, *, ttl_s: float = 3600.0) -> str:
        """Return an address at which browsers and programs reach a port of the sandbox for `ttl_s` seconds. Raises
        ToolFailure(PERMISSION_DENIED) when the tenant's class has no previews.
        """
        from toolcrew.contract.session_views import PreviewView

        ask = Ask("POST", f"{self._path}/ports/{port}", repeats=True, body={"ttl_s": ttl_s})
        return parse(PreviewView, self._client.send(ask)).url

    def import_folder(self, folder: Path | str, path: str = "/workspace") -> None:
        """Copy the content of a local folder, at most 64 MiB, into a folder of the sandbox, which is created."""
        from toolcrew.archives.folders import pack_folder

        content = pack_folder(Path(folder))
        params = {"path": path}
        ask = Ask("PUT", f"{self._path}/archive", repeats=True, params=params, content=content, wait_s=OPEN_S)
        self._client.send(ask)

    def export(self, folder: Path | str, path: str = "/workspace") -> list[str]:
        """Copy a folder of the sandbox into a local folder, which is created. Return the names of entries that were
        skipped: links that leave the folder, and special files.
        """
        from toolcrew.archives.folders import unpack_archive

        ask = Ask("GET", f"{self._path}/archive", repeats=True, params={"path": path}, wait_s=OPEN_S)
        content = self._client.send(ask)
        return unpack_archive(content, Path(folder))


class Runs:
    """Runs of agents, which continue when this program ends."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def start(
        self,
        instruction: "RunBody | str",
        *,
        environment: "ItemEnvironment | None" = None,
        idempotency_key: str | None = None,
        metadata: Mapping[str, str] | None = None,
        priority: int = 0,
        webhook: "Webhook | None" = None,
    ) -> "RunView":
        """Queue a run. `environment`: an open session, or the image, workspace and options of a new one. The same
        `idempotency_key` starts one run, and then also after a lost connection.
        """
        from toolcrew.contract.run_views import RunView

        fields = {"instruction": instruction} if isinstance(instruction, str) else run_fields(instruction)
        body = {
            **fields,
            **(environment.model_dump(mode="json", exclude_defaults=True) if environment is not None else {}),
            "metadata": dict(metadata or {}),
            "priority": priority,
            "webhook": webhook.model_dump(mode="json") if webhook is not None else None,
        }
        return parse(RunView, self._client.send(with_key(Ask("POST", "/v1/runs", body=body), idempotency_key)))

    def get(self, run: str) -> "RunView":
        """Return the state of a run with its full answer."""
        from toolcrew.contract.run_views import RunView

        return self._client.get(RunView, _run_path(run))

    def list(self, *, state: "DurableRunState | None" = None) -> "Generator[RunView]":
        """Yield the runs of the tenant, the newest first."""
        from toolcrew.contract.access_views import Page
        from toolcrew.contract.run_views import RunView

        return self._client.pages(Page[RunView], "/v1/runs", {"state": state and state.value})

    def cancel(self, run: str) -> "RunView":
        """End a run: immediately if it waits, otherwise within 2 s."""
        from toolcrew.contract.run_views import RunView

        return parse(RunView, self._client.send(Ask("POST", f"{_run_path(run)}/cancel", repeats=True)))

    def fork(self, run: str, *, step: int, n: int = 1, idempotency_key: str | None = None) -> "Sequence[RunView]":
        """Queue `n` runs that share the first `step` steps of a run that was started with `keep_states`."""
        from toolcrew.contract.run_views import RunForks

        ask = Ask("POST", f"{_run_path(run)}/fork", body={"step": step, "n": n}, wait_s=OPEN_S)
        return parse(RunForks, self._client.send(with_key(ask, idempotency_key))).runs

    def transcript(self, run: str) -> Sequence[dict[str, Any]]:
        """Return the run's messages so far, in the format of OpenAI's chat API."""
        answer = self._client.send(Ask("GET", f"{_run_path(run)}/transcript", repeats=True))
        messages: list[dict[str, Any]] = parse_object(answer)["messages"]
        return messages

    def follow(self, run: str, after: str = "") -> Generator[tuple[str, str]]:
        """Yield the run's events as they occur, each as (id, JSON), until the last event, RunEnded. After a lost
        connection it continues, and no event is left out or repeated. `after`: the id of the last known event.
        """
        lost = 0
        while True:
            headers = {"Accept": "text/event-stream", **({"Last-Event-ID": after} if after else {})}
            ask = Ask("GET", f"{_run_path(run)}/events", repeats=True, headers=headers)
            try:
                with closing(self._client.follow(ask)) as events:
                    for event in events:
                        lost, after = 0, event.id
                        yield event.id, event.data
                        if event.event == "RunEnded":
                            return
            except ApiUnavailable:
                lost += 1
                if lost > 1:
                    raise
            time.sleep(RECONNECT_S)

    def wait(self, run: str) -> "RunView":
        """Return the run after its end."""
        for _ in self.follow(run):
            pass
        return self.get(run)


class Batches:
    """Batches of runs."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def submit(
        self,
        lines: Iterable[Mapping[str, Any]] | Path | str,
        options: "BatchOptions | None" = None,
        *,
        files: Mapping[str, bytes | Path | str] | None = None,
        webhook_secret: str | None = None,
        idempotency_key: str | None = None,
    ) -> "SubmittedBatch":
        """Queue a run for every line. `lines`: objects with at least `instruction`, or a JSONL file. The same
        `idempotency_key`, or the same id in `options`, makes one batch.

        `files`: name -> an archive, as bytes or as a local path, or a local folder. Each is uploaded once, and replaces
        its name in the field `workspace` of the lines. Uploads have new ids, so a second submission with the same
        `idempotency_key` has other lines and is refused: upload the files before, and name their ids in the lines.
        """
        from toolcrew.contract.run_views import SubmittedBatch

        content = _read_lines(lines)
        if files:
            uploads = {name: (self._client.files.upload(data)).id for name, data in files.items()}
            content = replace_workspaces(content, uploads)
        headers = {"Content-Type": "application/jsonl"} | ({"Webhook-Secret": webhook_secret} if webhook_secret else {})
        params = options.model_dump(mode="json", exclude_defaults=True) if options is not None else {}
        ask = Ask("POST", "/v1/batches", params=params, content=content, headers=headers, wait_s=OPEN_S)
        return parse(SubmittedBatch, self._client.send(with_key(ask, idempotency_key)))

    def get(self, batch: str) -> "BatchStatus":
        """Return the state of a batch."""
        from toolcrew.contract.run_views import BatchStatus

        return self._client.get(BatchStatus, _batch_path(batch))

    def list(self) -> "Generator[BatchStatus]":
        """Yield the batches of the tenant, the newest first."""
        from toolcrew.contract.access_views import Page
        from toolcrew.contract.run_views import BatchStatus

        return self._client.pages(Page[BatchStatus], "/v1/batches")

    def cancel(self, batch: str) -> "BatchStatus":
        """Start no further items and end the running items."""
        from toolcrew.contract.run_views import BatchStatus

        return parse(BatchStatus, self._client.send(Ask("POST", f"{_batch_path(batch)}/cancel", repeats=True)))

    def retry(self, batch: str, kinds: Sequence[str] = ("infrastructure",)) -> int:
        """Retry the failed items with these kinds of failure. Return how many run again."""
        answer = self._client.send(Ask("POST", f"{_batch_path(batch)}/retry", body={"kinds": list(kinds)}))
        return int(parse_object(answer)["items"])

    def delete(self, batch: str) -> None:
        """Delete an ended batch with its items and results."""
        self._client.send(Ask("DELETE", _batch_path(batch)))

    def results(self, batch: str) -> Generator[dict[str, Any]]:
        """Yield the rows of all finished items, succeeded and failed."""
        with self._client.stream(Ask("GET", f"{_batch_path(batch)}/results", repeats=True)) as response:
            for line in response.iter_lines():
                yield json.loads(line)

    def wait(self, batch: str) -> "BatchStatus":
        """Return the batch after its end. Asks every 2 s."""
        while True:
            status = self.get(batch)
            if status.ended_at is not None:
                return status
            time.sleep(RECONNECT_S)


class Calls:
    """Calls of the tenant by their ids, no matter which program makes them."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def get(self, call: str) -> dict[str, Any]:
        """Return where a call waits or runs, since when, and its outcome. Calls are kept for a day."""
        return parse_object(self._client.send(Ask("GET", f"/v1/calls/{segment(call)}", repeats=True)))

    def list(self) -> Generator[dict[str, Any]]:
        """Yield the calls that wait, run, or ended recently."""
        from toolcrew.contract.access_views import Page

        return self._client.pages(Page[Any], "/v1/calls")

    def kill(self, call: str, reason: str = "") -> dict[str, Any]:
        """Kill a call that waits or runs, and return its state after the end. Its caller gets CANCELLED."""
        ask = Ask("POST", f"/v1/calls/{segment(call)}/kill", body={"reason": reason}, wait_s=QUEUE_S)
        return parse_object(self._client.send(with_key(ask)))


class Skills:
    """The skills of the tenant."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def list(self) -> "Generator[SkillView]":
        """Yield the tenant's own skills and those of the workers."""
        from toolcrew.contract.access_views import Page, SkillView

        return self._client.pages(Page[SkillView], "/v1/skills")

    def install(self, archive: bytes | Path | str, *, replace: bool = False) -> "SkillView":
        """Install a skill: its folder as a .zip of at most 16 MiB, as bytes or as a local path."""
        from toolcrew.contract.access_views import SkillView

        content = archive if isinstance(archive, bytes) else Path(archive).read_bytes()
        ask = Ask("POST", "/v1/skills", params={"replace": replace or None}, content=content, wait_s=OPEN_S)
        return parse(SkillView, self._client.send(ask))

    def remove(self, name: str) -> None:
        """Remove a skill that was installed for the tenant."""
        self._client.send(Ask("DELETE", f"/v1/skills/{segment(name)}"))


class Approvals:
    """The calls that wait for a decision."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def list(self) -> Generator[dict[str, Any]]:
        """Yield the calls that wait, the first to expire first."""
        from toolcrew.contract.access_views import Page

        return self._client.pages(Page[Any], "/v1/approvals")

    def decide(
        self,
        approval: str,
        decision: Literal["allow", "modify", "reject"],
        *,
        digest: str,
        reason: str = "",
        arguments: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Decide about a call, once. `digest`: as `list` shows it. `arguments`: of the decision `modify` only."""
        body = {"decision": decision, "digest": digest, "reason": reason, "arguments": arguments}
        ask = Ask("POST", f"/v1/approvals/{segment(approval)}", body=body)
        return parse_object(self._client.send(with_key(ask)))


class Files:
    """Stored files of the tenant."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def upload(self, data: bytes | Path | str) -> "StoredFile":
        """Store an archive (tar, compressed tar, or zip) or a git bundle, as bytes or as a local path, or a local
        folder of at most 64 MiB.
        """
        from toolcrew.contract.session_views import StoredFile

        content = data if isinstance(data, bytes) else _read_upload(Path(data))
        return parse(StoredFile, self._client.send(Ask("POST", "/v1/files", content=content, wait_s=OPEN_S)))

    def list(self) -> "Generator[StoredFile]":
        """Yield uploads and artifacts, the newest first."""
        from toolcrew.contract.access_views import Page
        from toolcrew.contract.session_views import StoredFile

        return self._client.pages(Page[StoredFile], "/v1/files")

    def download(self, file: str, path: Path | str) -> None:
        """Write the content of a file to a local path."""
        ask = Ask("GET", f"/v1/files/{segment(file)}/content", repeats=True)
        with self._client.stream(ask) as response:
            with Path(path).open("wb") as out:
                for piece in response.iter_bytes():
                    out.write(piece)

    def delete(self, file: str) -> None:
        """Delete a file."""
        self._client.send(Ask("DELETE", f"/v1/files/{segment(file)}"))


OPEN_S = 600.0
"""Seconds that opening a sandbox, packing its files and checking a large batch may take."""
QUEUE_S = 600.0
"""Seconds that a program may wait for a slot."""
RECONNECT_S = 2.0


def _tell(handler: OnOutput, *texts: str) -> None:
    handler(*texts)


def _read_lines(lines: Iterable[Mapping[str, Any]] | Path | str) -> bytes:
    if isinstance(lines, Path | str):
        return Path(lines).read_bytes()
    return "".join(f"{json.dumps(line, allow_nan=False)}\n" for line in lines).encode()


def _read_upload(path: Path) -> bytes:
    if not path.is_dir():
        return path.read_bytes()
    from toolcrew.archives.folders import pack_folder

    return pack_folder(path)


def _run_path(run: str) -> str:
    return f"/v1/runs/{segment(run)}"


def _batch_path(batch: str) -> str:
    return f"/v1/batches/{segment(batch)}"
