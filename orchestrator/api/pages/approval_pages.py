"""The pages for approving calls.

Invariant: a page shows the exact characters of a call, and the decision is bound to the digest of the shown call.
"""

import asyncio
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Form, Request, Response

from toolcrew.contract.approvals import Decision
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.schema import MAX_VALUES
from toolcrew.contract.strict_json import InvalidJson, parse_object
from toolcrew.orchestrator.api.pages.operating import DONE, back
from toolcrew.orchestrator.api.pages.people import FormSender, PageViewer, Person, build_not_found
from toolcrew.orchestrator.api.pages.rendering import render
from toolcrew.orchestrator.api.pages.route import PageRoute, is_fragment
from toolcrew.orchestrator.api.pages.run_pages import has_page
from toolcrew.orchestrator.api.pages.untrusted_text import count_suspicious
from toolcrew.orchestrator.http.problems import ApiCode, ApiProblem
from toolcrew.store.approvals import AlreadyAnswered, OtherCall, PendingQuestion, QuestionOver, UnknownQuestion

router = APIRouter(route_class=PageRoute, include_in_schema=False)

PAGE = 20
MAX_CHARS = 32_000
"""Limit of the characters of all arguments on a page with several questions.

The limit exists because a page examines and marks every character, which takes time. A question with longer arguments
has a page of its own.
"""


@dataclass(frozen=True)
class ShownArgument:
    """Argument of a call, with its complete text.

    `unseen`: number of invisible characters. `alike`: number of characters that look like other characters.
    """

    name: str
    text: str
    unseen: int
    alike: int


@dataclass(frozen=True)
class QuestionView:
    """A question as a page shows it.

    `is_left_out`: the arguments are too long for this page, so the page does not offer a decision.
    """

    pending: PendingQuestion
    has_run_page: bool
    is_left_out: bool = False

    @property
    def parts(self) -> tuple[ShownArgument, ...]:
        """Return the arguments of the call, each with its complete text."""
        command = self.pending.question.command
        return tuple(
            _shown(f"{name}, the command" if value == command and name != "command" else name, value)
            for name, value in self.pending.question.call.arguments.items()
        )

    @property
    def editable(self) -> str:
        """Return the arguments as ASCII JSON, in which every character is visible and no character is lost."""
        return json.dumps(self.pending.question.call.arguments, indent=2, ensure_ascii=True)


@router.get("/approvals")
async def approvals(request: Request, person: PageViewer, cursor: str = "", done: str = "") -> Response:
    """Show the questions that wait for a decision. The question that expires first is first."""
    viewer = await person.viewer()
    page = await person.app_state.parts.approvals.pending(person.actor, viewer.tenant, cursor or None, PAGE)
    ids = ",".join(question.question.id for question in page.questions)
    if is_fragment(request):
        return render("approvals.part.html", viewer, ids=ids, shown=request.query_params.get("shown", ids))
    values: dict[str, Any] = {
        "questions": await asyncio.gather(
            *(_build_question(person, question, is_whole) for question, is_whole in _select_fitting(page.questions))
        ),
        "cursor": page.cursor,
        "ids": ids,
        "shown": ids,
    }
    return await person.render(
        "approvals.html",
        title="Approvals",
        page="approvals",
        may_decide=_may_decide(person),
        done=DONE.get(done),
        **values,
    )


@router.get("/approvals/{id_}")
async def approval(id_: str, person: PageViewer) -> Response:
    """Show one question."""
    try:
        pending = await person.app_state.parts.approvals.get(id_, person.actor)
    except ToolFailure as error:
        raise _build_problem(error) from error
    title = f"Approve {pending.question.call.name}?"
    return await person.render(
        "approval.html",
        title=title,
        page="approvals",
        item=await _build_question(person, pending),
        may_decide=_may_decide(person),
    )


@router.post("/approvals/{id_}")
async def decide(
    id_: str,
    person: FormSender,
    digest: Annotated[str, Form(max_length=256)],
    decision: Annotated[str, Form(pattern="^(allow|change|deny)$")],
    reason: Annotated[str, Form(max_length=1024)] = "",
    arguments: Annotated[str, Form()] = "",
) -> Response:
    """Allow the call that was shown, unchanged or with other arguments, or deny it."""
    changed = _parse_arguments(arguments) if decision == "change" else None
    answer = Decision(decision != "deny", reason.strip(), changed, digest)
    try:
        await person.app_state.parts.approvals.decide(id_, answer, digest=digest, actor=person.actor)
    except ToolFailure as error:
        raise _build_problem(error) from error
    return back("approvals", tenant=person.tenant, done="denied" if decision == "deny" else "allowed")


def _select_fitting(questions: Iterable[PendingQuestion]) -> Iterator[tuple[PendingQuestion, bool]]:
    """Yield pairs of a question and whether the page has room for its arguments."""
    remaining = MAX_CHARS
    for question in questions:
        length = len(json.dumps(question.question.call.arguments, ensure_ascii=False))
        yield question, length <= remaining
        remaining -= length if length <= remaining else 0


async def _build_question(person: Person, pending: PendingQuestion, is_whole: bool = True) -> QuestionView:
    question = pending.question
    return QuestionView(pending, await has_page(person, question.tenant, question.run), not is_whole)


def _shown(name: str, value: Any) -> ShownArgument:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2)
    return ShownArgument(name, text, *count_suspicious(text))


def _may_decide(person: Person) -> bool:
    return person.is_operator or person.app_state.settings.approvers == "tenant"


def _parse_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments. Raises ApiProblem for text that is not one JSON object, and for a repeated name: a person
    could read one of its values and the tool another.
    """
    try:
        return parse_object(text, MAX_VALUES)
    except InvalidJson as error:
        raise ApiProblem(
            ErrorCode.INVALID_ARGUMENTS,
            f"nothing was decided, because the arguments are not one JSON object ({error.message}). Go back and enter "
            "{...}",
        ) from error


def _build_problem(error: ToolFailure) -> Exception:
    """Return the error for people. A missing question and another tenant's question give the same error."""
    if isinstance(error, UnknownQuestion):
        return build_not_found("question")
    if isinstance(error, AlreadyAnswered | QuestionOver | OtherCall):
        return ApiProblem(ApiCode.CONFLICT, error.message)
    return error
