"""Serves one worker's connection: one request after the other, a call's frames relayed both ways."""

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import structlog

from contract.errors import ErrorCode, OperatorError, ToolFailure
from workers.logs import bound_to_session
from workers.sandboxd.channels import WorkerLink
from workers.sandboxd.frames import Frame, FrameError
from workers.sandboxd.requests import check_request, count_budget, parse_skill, parse_terms, parse_text
from workers.sandboxd.runtime.factory import Ending
from workers.sandboxd.sandbox import RunningCall, Sandbox
from workers.sandboxd.sessions import MAX_ROWS, Sessions
from workers.sandboxd.skill_shelf import SkillShelf

log = structlog.get_logger(__name__)

Answer = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]
_MESSAGE_CHARS = 4096


class Connection:
    """A worker's requests. `answer` gives the answer to every verb but `call`, `skill` and `sessions`. A worker that leaves cancels its call."""

    def __init__(self, link: WorkerLink, sessions: Sessions, shelf: SkillShelf, answer: Answer) -> None:
        self._link = link
        self._sessions = sessions
        self._shelf = shelf
        self._answer = answer

    async def serve(self) -> None:
        """Until the worker leaves. Raises FrameError and ConnectionError when it breaks the protocol or leaves in the middle."""
        while (frame := await self._link.next()) is not None:
            verb = frame.header.get("verb")
            if verb == "data":
                continue  # the body of a call that was refused: its answer has been sent
            try:
                with bound_to_session(frame.header.get("sandbox")):
                    await self._serve(verb, frame)
            except ToolFailure as failure:
                self._refuse(failure.code, failure.message)
            except OperatorError as error:
                self._refuse(error.code, str(error), is_ending=isinstance(error, Ending))
            await self._link.drain()

    async def _serve(self, verb: object, frame: Frame) -> None:
        if verb == "call":
            await self._call(frame)
        elif verb == "skill":
            self._link.send({"ok": True, "place": await self._place_skill(frame)})
        elif verb == "sessions":
            self._list(frame.header)
        else:
            self._link.send({"ok": True, **await self._answer(frame.header)})

    async def _place_skill(self, frame: Frame) -> str | None:
        """Where the bundle is; without a body None when it is not there yet."""
        scope, digest, size = parse_skill(frame.header)
        place = self._shelf.find(scope, digest)
        if size == 0:
            return place
        return await self._shelf.place(scope, digest, self._body(frame.body, size))

    async def _body(self, first: bytes, size: int) -> AsyncIterator[bytes]:
        """The body that was declared, of which the first frame has this."""
        left = size - len(first)
        if left < 0:
            raise FrameError("more body than was declared")
        yield first
        while left > 0:
            data = await self._next_data(left)
            left -= len(data)
            yield data

    async def _next_data(self, left: int) -> bytes:
        frame = await self._link.next()
        if frame is None:
            raise ConnectionError("the worker left in the middle of a body")
        if frame.header.get("verb") != "data" or len(frame.body) > left:
            raise FrameError("something else, or more, than the body that was declared")
        return frame.body

    def _list(self, header: Mapping[str, Any]) -> None:
        """Rows as a body: as a header of that size they would be checked a value at a time."""
        rows = self._sessions.describe(str(header.get("after") or ""))
        following = rows[-1]["name"] if len(rows) == MAX_ROWS else None
        self._link.send({"ok": True, "next": following}, json.dumps(rows, separators=(",", ":")).encode("ascii"))

    def _refuse(self, code: ErrorCode, message: str, *, is_ending: bool = False) -> None:
        ending = {"is_ending": True} if is_ending else {}
        self._link.send({"ok": False, "code": code.value, "message": message[:_MESSAGE_CHARS], **ending})

    async def _call(self, frame: Frame) -> None:
        request = check_request(frame.header.get("request"))
        if len(frame.body) > request["body_bytes"]:
            raise FrameError("more body than was declared")
        call_id = str(frame.header.get("call", ""))
        session, sandbox = await self._sessions.use(parse_text(frame.header, "sandbox"), call_id, parse_terms(frame.header))
        if self._link.is_gone:
            raise ConnectionError("the worker left before its call began")
        if call_id in session.called_off:
            raise ToolFailure(ErrorCode.CANCELLED, "the call was cancelled before it began")
        started, done = time.monotonic(), dict[str, Any]()
        call = sandbox.begin(call_id, request, count_budget(request), self._relay)
        self._announce(sandbox, call, request, frame.body)
        self._link.watch(lambda: self._abandon(sandbox, call), lambda is_slow: self._set_pace(sandbox, is_slow))
        try:
            await self._send_body(sandbox, call, request["body_bytes"] - len(frame.body))
            sandbox.start_clock(call)
            done = await call.done
        finally:
            self._link.unwatch()
            sandbox.release(self._link)
            sandbox.cancel(call)
            session.traces.note(call.op, done)
            session.used_at = time.monotonic()
        if self._link.is_gone:
            raise ConnectionError("the worker left during a call")
        own: dict[str, Any] = {"ok": True, "sandbox": session.describe_sandbox(sandbox), "sandbox_s": time.monotonic() - started}
        if "sandbox_lost" in done:
            sandbox.loss_told = True
            own["workspace_kept"] = session.workspace.outlives_container
        log.info("sandbox_call_ended", call=call_id, op=call.op, sandbox=sandbox.container[:12], seconds=round(own["sandbox_s"], 4))
        self._send_done(done, own)

    def _announce(self, sandbox: Sandbox, call: RunningCall, request: dict[str, Any], body: bytes) -> None:
        try:
            sandbox.feed(call, request, body)
        except FrameError as error:
            sandbox.forget(call)
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"the request is too large for a frame: {error}") from error

    async def _send_body(self, sandbox: Sandbox, call: RunningCall, left: int) -> None:
        while left > 0:
            await sandbox.drain()
            data = await self._next_data(left)
            left -= len(data)
            sandbox.feed(call, {"op": "data"}, data)

    def _relay(self, frame: Frame) -> None:
        self._link.send({"ev": "data", "stream": frame.header["stream"]}, frame.body)

    def _abandon(self, sandbox: Sandbox, call: RunningCall) -> None:
        # The call's end lies behind output that nobody will take: read on, or it is never seen.
        sandbox.release(self._link)
        sandbox.cancel(call)

    def _set_pace(self, sandbox: Sandbox, is_slow: bool) -> None:
        if is_slow:
            sandbox.hold(self._link)
        else:
            sandbox.release(self._link)

    def _send_done(self, done: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        try:
            self._link.send({**done, **own})
        except FrameError:
            error = {"code": ErrorCode.INTERNAL.value, "message": "the guest's answer is too large to be handed on"}
            loss = {name: done[name] for name in ("sandbox_lost", "removal_failed") if name in done}
            self._link.send({"ev": "done", "error": error, **loss, **own})
