"""The model of one run. It answers from the run's journal first. A new request is checked against the budgets, counted,
reported to the gate of its endpoint, and its reply is written to the journal.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace

from toolcrew.concurrency.tasks import retry_until_available
from toolcrew.orchestrator.dialects.model import Chunk, Model, ModelRequest
from toolcrew.orchestrator.loop.reply_stream import ReplyChanged
from toolcrew.orchestrator.runs.journal import RunJournal
from toolcrew.orchestrator.runs.model_account import ModelAccount, ReplyBill
from toolcrew.orchestrator.runs.run_gate import GatedRun, UngatedRun


async def send_at_once() -> None:
    """Default of `before_request`: do nothing."""


class RunModel:
    """A Model. The chunks of a reply are yielded while they arrive, and the stream ends when the reply is in the
    journal.
    """

    def __init__(
        self,
        model: Model,
        account: ModelAccount,
        journal: RunJournal,
        gate: GatedRun | UngatedRun,
        sampling: Mapping[str, object],
        before_request: Callable[[], Awaitable[None]] = send_at_once,
    ) -> None:
        """Wrap `model`. `sampling`: fields that every request contains. `before_request`: is awaited before each new
        request.
        """
        self._model = model
        self._account = account
        self._journal = journal
        self._gate = gate
        self._sampling = dict(sampling)
        self._before_request = before_request

    @property
    def name(self) -> str:
        return self._model.name

    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        """Yield the next reply of the journal, or the reply of the model if the journal has no more replies.

        Raises the exceptions of the model, of the account and of the gate; an incomplete reply is not logged. Raises
        ReplyChanged after the last chunk: the journal has the reply in another form. Raises SandboxUnavailable: the
        run's session no longer exists.
        """
        logged = self._journal.next_reply()
        if logged is not None:
            for chunk in logged:
                yield chunk
            return
        await self._before_request()
        self._journal.check_session()
        bill, received = ReplyBill(self._account, request), list[Chunk]()
        sent_request = replace(request, extra={**request.extra, **self._sampling}, before_send=bill.reserve)
        is_complete = is_refunded = False
        try:
            with self._gate.request():
                await retry_until_available(self._account.check)
                async for chunk in self._model.stream(sent_request):
                    self._gate.record_answer()
                    bill.add(chunk)
                    received.append(chunk)
                    yield chunk
            is_complete = True
        except Exception:
            # A server that answers with an error bills nothing. A cancellation is not caught here: the server may
            # already work on the reply.
            is_refunded = not received
            raise
        finally:
            if not is_complete:
                await bill.end_early(is_refunded=is_refunded)
        changed = await self._journal.record_reply(received, bill.remainder())
        if changed is not None:
            raise ReplyChanged(changed)

    async def aclose(self) -> None:
        """Do nothing: the code that opened the model closes the model."""
