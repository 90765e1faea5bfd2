"""Map requests to answers: the chat endpoint that plays a script, a recording or a real endpoint; the list of models;
and the counters.
"""

import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from tests.model_server.chat_request import BadRequest, ChatRequest, read_body, read_chat_request
from tests.model_server.counters import Counters
from tests.model_server.draws import draw_span
from tests.model_server.faults import NOTHING, Faults, Hit, goes_for
from tests.model_server.replies import Written, build_error, build_probe_reply, dump, event
from tests.model_server.script import Cut, NoEnd, Rule, Script, Shape, Status
from tests.model_server.templates import TemplateError
from tests.model_server.wire import Plan, Request

STREAM = "text/event-stream; charset=utf-8"
_PLACES = "POST /v1/chat/completions, GET /v1/models, GET /stats, POST /reset"


class Source(Protocol):
    """A source of replies for a server without reply rules."""

    def answer(self, request: Request, chat: ChatRequest) -> "Plan | Awaitable[Plan]": ...

    def reset(self) -> None: ...


class Chat:
    """The service of one server. `script` defines the key and the faults; without a `source` also the replies."""

    def __init__(self, script: Script, source: Source | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.counters = Counters()
        self._script = script
        self._source = source
        self._faults = Faults(script, now)
        self._key = re.compile(script.server.key)
        self._rules = _index(script.rules)

    def opened(self) -> None:
        self.counters.opened()

    def closed(self) -> None:
        self.counters.closed()

    def left(self) -> None:
        self.counters.left += 1

    def answer(self, request: Request) -> "Plan | Awaitable[Plan]":
        path = request.path.partition("?")[0].removesuffix("/")
        method = request.method
        if path == "/v1/chat/completions" and method == "POST":
            return self._chat(request)
        if path == "/v1/models" and method == "GET":
            return Plan(pieces=[self._models()])
        if path == "/stats" and method == "GET":
            return Plan(pieces=[dump(self.counters.tell())])
        if path == "/reset" and method == "POST":
            self._reset()
            return Plan(pieces=[b"{}"])
        return Plan(
            404, pieces=[build_error(f"there is no {method} {path or '/'}: this server has {_PLACES}", "not_found")]
        )

    def _reset(self) -> None:
        self.counters.reset()
        self._faults.reset()
        if self._source is not None:
            self._source.reset()

    def _models(self) -> bytes:
        server = self._script.server
        entry = {"id": server.model, "object": "model", "created": 0, "owned_by": "tests"}
        window = {"context_window": server.context_window} if server.context_window else {}
        return dump({"object": "list", "data": [{**entry, **window}]})

    def _chat(self, request: Request) -> "Plan | Awaitable[Plan]":
        try:
            chat = read_chat_request(read_body(request.body), request.body, self._key)
        except BadRequest as error:
            return self._refuse(str(error), "bad_request")
        if self._source is None and chat.probe is not None and self._script.server.answers_probes:
            self.counters.probes += 1
            return _plan(build_probe_reply(chat), chat, self._script.server.chunk_chars)
        attempt = self.counters.ask(chat)
        hit = self._faults.choose(chat, attempt)
        self.counters.faults.update(hit.kinds)
        early = _fault_plan(hit)
        if early is not None:
            return early
        try:
            answer = self._scripted(chat, attempt, hit) if self._source is None else self._source.answer(request, chat)
        except TemplateError as error:
            return self._refuse(f"conversation {chat.conversation!r}, step {chat.step}: {error}", "script_error")
        return self._counted(answer, chat, hit) if isinstance(answer, Plan) else self._counted_later(answer, chat, hit)

    def _counted(self, plan: Plan, chat: ChatRequest, hit: Hit) -> Plan:
        """Return the plan with the fault `hit`. The plan counts itself after it was sent completely."""
        if plan.status != 200:
            return plan
        if hit is not NOTHING:
            plan = _afflict(plan, hit)
        if hit.fault is not None:
            return plan
        return replace(plan, on_whole=partial(self.counters.reply, chat.conversation, chat.step))

    async def _counted_later(self, answer: Awaitable[Plan], chat: ChatRequest, hit: Hit) -> Plan:
        return self._counted(await answer, chat, hit)

    def _refuse(self, sentence: str, code: str) -> Plan:
        self.counters.refused += 1
        return Plan(400, pieces=[build_error(sentence, code)])

    def _scripted(self, chat: ChatRequest, attempt: int, hit: Hit) -> Plan:
        rule = self._find(chat)
        if rule is None:
            report = (
                f"the result begins {chat.observation[:200]!r}"
                if chat.observation is not None
                else "no call has a result yet"
            )
            raise TemplateError(f"no rule goes for this request ({report}): add a line of kind rule that does")
        values = {
            "item": chat.conversation,
            "step": str(chat.step),
            "attempt": str(attempt),
            "observation": chat.observation or "",
            "user": chat.user,
        }
        if rule.when.observation is not None and chat.observation is not None:
            found = re.search(rule.when.observation, chat.observation)
            values |= {f"match.{name}": value or "" for name, value in (found.groupdict() if found else {}).items()}
        server, about = self._script.server, (chat.conversation, chat.step, attempt)
        first_byte_s, chunk_s = (
            draw_span(server_span if span is None else span, server.seed, name, *about)
            for name, span, server_span in (
                ("first", rule.reply.first_byte_s, server.first_byte_s),
                ("chunk", rule.reply.chunk_s, server.chunk_s),
            )
        )
        written = Written(rule.reply, chat, values)
        has_end = not isinstance(hit.fault, NoEnd)
        chunk_chars = rule.reply.chunk_chars or server.chunk_chars
        return replace(_plan(written, chat, chunk_chars, has_end=has_end), first_byte_s=first_byte_s, piece_s=chunk_s)

    def _find(self, chat: ChatRequest) -> Rule | None:
        """Return the first matching rule in the script's order, among the rules for this conversation and the rules
        for any conversation.
        """
        own, general = self._rules.get(chat.conversation, ()), self._rules.get(None, ())
        found = [next(((n, rule) for n, rule in rules if goes_for(rule.when, chat)), None) for rules in (own, general)]
        hits = [entry for entry in found if entry is not None]
        return min(hits, key=lambda entry: entry[0])[1] if hits else None


def _plan(written: Written, chat: ChatRequest, chunk_chars: int, *, has_end: bool = True) -> Plan:
    if not chat.is_stream:
        return Plan(pieces=[written.whole()])
    return Plan(
        content_type=STREAM, pieces=written.events(chunk_chars, has_end=has_end), is_stream=True, more=written.more()
    )


def _afflict(plan: Plan, hit: Hit) -> Plan:
    """Return the plan with the faults that do not depend on the reply's content."""
    fault = hit.fault
    plan = replace(plan, first_byte_s=plan.first_byte_s + hit.first_byte_s, piece_s=plan.piece_s + hit.chunk_s)
    if isinstance(fault, Cut):
        assert isinstance(plan.pieces, Sequence)
        return replace(plan, cut_after=min(fault.after_bytes, max(0, sum(map(len, plan.pieces)) - 1)))
    if isinstance(fault, NoEnd):
        # A reply without streaming cannot omit its end in an orderly way.
        return replace(plan, then=("end" if fault.then == "close" else fault.then) if plan.is_stream else "hold")
    return plan


def _index(rules: Sequence[Rule]) -> Mapping[str | None, Sequence[tuple[int, Rule]]]:
    """Group the rules by conversation, so that thousands of conversations cost no more than one. None: rules for any
    conversation.
    """
    index: dict[str | None, list[tuple[int, Rule]]] = {}
    for number, rule in enumerate(rules):
        names: Sequence[str | None] = rule.when.conversations or (None,)
        for name in names:
            index.setdefault(name, []).append((number, rule))
    return index


def _fault_plan(hit: Hit) -> Plan | None:
    """Return the answer that replaces a reply. None: the reply is made, possibly with another fault."""
    fault = hit.fault
    if isinstance(fault, Status):
        after = (("retry-after", f"{fault.retry_after:g}"),) if fault.retry_after is not None else ()
        body = build_error(fault.message, "rate_limit_exceeded" if fault.status == 429 else "scripted_failure")
        return Plan(fault.status, headers=after, pieces=[body], first_byte_s=hit.first_byte_s)
    if isinstance(fault, Shape):
        content_type, body = _SHAPES[fault.shape]
        return Plan(content_type=content_type, pieces=[body], first_byte_s=hit.first_byte_s)
    return None


_HTML = b"<!doctype html><html><head><title>502 Bad Gateway</title></head><body><h1>502 Bad Gateway</h1></body></html>"
_SHAPES: Mapping[str, tuple[str, bytes]] = {
    "no_choices": ("application/json", dump({"id": "chatcmpl-0", "object": "chat.completion", "created": 0})),
    "empty_choices": ("application/json", dump({"id": "chatcmpl-0", "object": "chat.completion", "choices": []})),
    "html": ("text/html; charset=utf-8", _HTML),
    "truncated_json": (
        "application/json",
        b'{"id":"chatcmpl-0","object":"chat.completion","choices":[{"index":0,"mess',
    ),
    "not_json": (STREAM, event("this is not JSON")),
    "empty": ("application/json", b""),
    "told_error": (STREAM, event({"error": {"message": "the server had an error", "type": "server_error"}})),
}
