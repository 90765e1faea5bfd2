"""Tasks of users in a real browser: log in, look at runs, approve, switch, pause, drain and cancel, with mouse and
keyboard.
"""

import asyncio
import json

import pytest
from playwright.async_api import Page, expect

from tests.support.api.page_harness import DEPLOYMENT, FLOWER, Visitors, World, log_in, take_picture
from tests.support.runs.batch_events import Attempt
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.names import control_queue
from toolcrew.contract.run_events import Failure, FailureKind, ModelReplied
from toolcrew.contract.run_spec import ItemEnvironment, RunBody
from toolcrew.store.approvals import AlreadyAnswered, ApprovalQuestion
from toolcrew.store.audit import LOCAL, Actor, Audit
from toolcrew.store.batches import BatchState, ForkSource, ItemOutcome
from toolcrew.store.run_log import RunLog

pytestmark = pytest.mark.asyncio(loop_scope="session")

expect.set_options(timeout=30_000)
ADMIN = Actor(key=LOCAL, role="admin")


async def read_answer(world: World, question: ApprovalQuestion) -> AlreadyAnswered:
    with pytest.raises(AlreadyAnswered) as failure:
        await world.approvals.get(question.id, ADMIN)
    return failure.value


async def tab_to(page: Page, name: str, most: int = 60) -> None:
    """Press Tab until the element with that name has the focus. Every element on the way must be visible."""
    for _ in range(most):
        await page.keyboard.press("Tab")
        here = await page.evaluate(
            "() => { const one = document.activeElement; return [one.getAttribute('aria-label') || "
            "one.labels?.[0]?.textContent || one.textContent, getComputedStyle(one).outlineStyle] }"
        )
        assert here[1] != "none", f"the focus is not seen on {here[0]}"
        if here[0].strip() == name:
            return
    pytest.fail(f"{name} is not reached with the keyboard")


async def test_a_running_run_is_shown_live(world: World, visitors: Visitors) -> None:
    async with visitors.visit("acme") as visit:
        page = visit.page
        async with world.open_run("Watch me") as worked:
            await page.goto(f"/runs/{worked.id}")
            await expect(page.get_by_role("heading", level=1)).to_contain_text("running")
            worked.begin_step(1)
            await expect(page.get_by_role("heading", name="Step 1")).to_be_visible()
            call = worked.send_call()
            worked.print_output(call, "first words\n")
            await expect(page.get_by_label("Output of bash_tool so far")).to_contain_text("first words")
            worked.print_output(call, "later words\n")
            await expect(page.get_by_label("Output of bash_tool so far")).to_contain_text("later words")
            await take_picture(page, "run-live")
            worked.finish_call()
            await expect(page.get_by_label("Output of bash_tool", exact=True)).to_contain_text("total 3")
        await expect(page.get_by_role("heading", level=1)).to_contain_text("succeeded")
        await expect(page.get_by_role("heading", name="Answer")).to_be_visible()
        await expect(page.locator("#live-state")).to_contain_text("The run has ended")
        assert await page.evaluate("window.owned") is None


async def test_the_fork_tree_links_runs_to_each_other(world: World, visitors: Visitors) -> None:
    run = await world.durable_runs.start("acme", RunBody(instruction="Branch here"))
    source = ForkSource(run=run.id, step=2, attempt=1, entries=0)
    fork = await world.durable_runs.start(
        "acme",
        RunBody(instruction="Branch here"),
        ItemEnvironment(),
        idempotency_key=None,
        priority=0,
        forked_from=source,
    )
    async with visitors.visit("acme") as visit:
        page = visit.page
        await page.goto(f"/runs/{run.id}")
        tree = page.get_by_role("region", name="Forks")
        await expect(tree).to_contain_text("after step 2:")
        await tree.get_by_role("link", name=fork.id).click()
        await expect(page.get_by_role("heading", level=1)).to_contain_text(fork.id)
        await expect(tree.locator("[aria-current=page]")).to_have_text(fork.id)
        await page.get_by_role("link", name=run.id).first.click()
        await expect(page.get_by_role("heading", level=1)).to_contain_text(run.id)
    for one in (run, fork):
        await world.durable_runs.cancel("acme", one.id)


async def test_a_run_is_cancelled(world: World, visitors: Visitors) -> None:
    run = await world.durable_runs.start("acme", RunBody(instruction="Never begun"))
    async with visitors.visit("operator") as visit:
        await visit.page.goto(f"/runs/{run.id}?of=acme")
        await visit.page.get_by_text("Cancel the run…").click()
        await visit.page.get_by_role("button", name="Cancel the run").click()
        await expect(visit.page.get_by_text("The cancellation has started")).to_be_visible()
        await expect(visit.page.get_by_role("heading", level=1)).to_contain_text("cancelled")
    entries = (await Audit(world.redis, DEPLOYMENT).read(actions=("run.cancel",))).entries
    assert [(one.target, one.actor.name) for one in entries if one.target == run.id] == [(run.id, "operator")]


async def test_an_approval_shows_the_exact_characters_and_is_allowed(world: World, visitors: Visitors) -> None:
    question = await world.ask("rm -rf /data\u202e cu\u0430l x\u200b \n", number=1, warning="it removes files")
    async with visitors.visit("acme") as visit:
        await visit.page.goto(f"/approvals/{question.id}")
        shown = visit.page.get_by_label("command, every character")
        await expect(shown).to_have_text(
            "rm -rf /data\\u202e cu\u0430\\u0430l x\\u200b\u00b7\u21b5", use_inner_text=True
        )
        await expect(visit.page.get_by_text("2 characters in it cannot be seen")).to_be_visible()
        below = await visit.page.evaluate(
            "() => document.querySelector('.warning').compareDocumentPosition(document.querySelector('pre.exact')) === "
            "Node.DOCUMENT_POSITION_PRECEDING"
        )
        assert below, "the warning stands after what it warns of"
        await take_picture(visit.page, "approval")
        await visit.page.get_by_role("button", name="Allow this dangerous call").click()
        await expect(visit.page.get_by_text("Allowed. The call continues.")).to_be_visible()
    assert (await read_answer(world, question)).answer.is_allowed


async def test_an_approval_with_changed_arguments_keeps_every_other_character(world: World, visitors: Visitors) -> None:
    question = await world.ask("ls \u202e\x00\t\n", number=3)
    async with visitors.visit("acme") as visit:
        await visit.page.goto(f"/approvals/{question.id}")
        await visit.page.get_by_text("Allow with other arguments…").click()
        box = visit.page.get_by_label("Arguments, as one JSON object")
        text = await box.input_value()
        assert text.isascii()
        assert json.loads(text) == question.call.arguments
        await box.fill(text.replace("ls ", "ls -l "))
        await visit.page.get_by_role("button", name="Allow with these").click()
        await expect(visit.page.get_by_text("Allowed. The call continues.")).to_be_visible()
    assert (await read_answer(world, question)).answer.arguments == {"command": "ls -l \u202e\x00\t\n"}


async def test_a_second_decision_is_refused_and_the_first_one_stays(world: World, visitors: Visitors) -> None:
    question = await world.ask("ls", number=4)
    async with visitors.visit("acme") as first, visitors.visit("operator") as second:
        for visit in (first, second):
            await visit.page.goto(f"/approvals/{question.id}")
        await first.page.get_by_role("button", name="Deny").click()
        await first.page.wait_for_url("**/approvals?*")
        second.expected = (409,)
        await second.page.get_by_role("button", name="Allow").click()
        await expect(second.page.get_by_role("alert")).to_contain_text("denied by acme")
    assert not (await read_answer(world, question)).answer.is_allowed


async def test_a_tool_is_disabled_for_all_tenants_and_for_one_tenant(world: World, visitors: Visitors) -> None:
    async with visitors.visit("operator") as visit:
        page = visit.page
        await page.goto("/tools")
        await page.get_by_label("Reason to disable webfetch_tool").fill("it is being <b>fixed</b>")
        await page.get_by_role("button", name="Disable webfetch_tool for all tenants").click()
        await expect(page.get_by_text("it is being <b>fixed</b>")).to_be_visible()
        await page.get_by_role("button", name="Enable webfetch_tool for all tenants").click()
        await expect(page.get_by_text("The tool is enabled")).to_be_visible()
        await page.get_by_label("Tenant", exact=True).select_option("acme")
        await page.get_by_role("button", name="Show", exact=True).click()
        await page.get_by_role("button", name="Disable webfetch_tool for acme").click()
        await expect(page.get_by_text("Disabled for this tenant")).to_be_visible()
        await page.goto("/audit")
        await expect(page.get_by_role("row").nth(1)).to_contain_text("tool.disable")
    async with visitors.visit("acme") as visit:
        await visit.page.goto("/tools")
        await expect(visit.page.get_by_text("Disabled for this tenant")).to_be_visible()
        assert await visit.page.get_by_role("button", name="able").count() == 0


async def test_tools_are_shown_as_the_tenant_policy_allows(world: World, visitors: Visitors) -> None:
    before = await world.tenants.policy("rival")
    await world.tenants.replace("rival", before.model_copy(update={"tools": ("read_tool", "webfetch_tool")}))
    try:
        async with visitors.visit("rival") as visit, asyncio.timeout(SOON_S):
            card = visit.page.get_by_role("heading", name="bash_tool")
            await visit.page.goto("/tools")
            # A policy takes effect everywhere within 2 seconds.
            while "forbidden" not in await card.inner_text():
                await visit.page.reload()
            assert "forbidden" not in await visit.page.get_by_role("heading", name="read_tool").inner_text()
        listed = (await visitors.api["rival"].get("/v1/tools")).json()["data"]
        assert {tool["name"]: tool["state"] for tool in listed} == {
            "bash_tool": "forbidden",
            "read_tool": "enabled",
            "webfetch_tool": "enabled",
        }
    finally:
        await world.tenants.replace("rival", before)


async def test_a_tenant_is_paused_and_resumed(world: World, visitors: Visitors) -> None:
    async with visitors.visit("operator") as visit:
        await visit.page.goto("/tenants")
        row = visit.page.get_by_role("row").filter(has_text="rival")
        await row.get_by_label("Reason to pause rival").fill("it does not pay")
        await row.get_by_role("button", name="Pause rival").click()
        await expect(row).to_contain_text("paused")
        assert (await world.tenants.policy("rival")).is_paused
        await row.get_by_role("button", name="Resume rival").click()
        await expect(row).to_contain_text("active")


async def test_draining_a_host_requires_the_confirmation_that_files_may_be_lost(
    world: World, visitors: Visitors
) -> None:
    await world.report_host("h7", queue="host.h7.b00t")
    async with visitors.visit("operator") as visit:
        card = visit.page.get_by_role("region", name="h7")
        await visit.page.goto("/hosts")
        await card.get_by_text("Take out of service…").click()
        visit.expected = (422,)
        await card.get_by_role("button", name="Drain h7").click()
        await expect(visit.page.get_by_role("alert")).to_contain_text("would lose their files")
    assert await world.redis.llen(control_queue("host.h7.b00t")) == 0


async def test_a_batch_is_watched_and_cancelled(world: World, visitors: Visitors) -> None:
    await world.submit_batch("acme", "to-cancel", "short", [(f"item-{number}", Attempt()) for number in range(5)])
    async with visitors.visit("acme") as visit:
        await visit.page.goto("/batches")
        await visit.page.get_by_role("link", name="to-cancel").click()
        await expect(visit.page.get_by_role("heading", name="Over time")).to_be_visible()
        await take_picture(visit.page, "batch")
        await visit.page.get_by_text("Cancel the batch…").click()
        await visit.page.get_by_role("button", name="Cancel the batch").click()
        await expect(visit.page.get_by_text("The cancellation has started")).to_be_visible()
    assert (await world.queue.batches.get("acme", "to-cancel")).state is BatchState.CANCELLED


async def test_a_call_is_found_by_its_id_and_by_its_celery_task_id(world: World, visitors: Visitors) -> None:
    task = await world.add_call("call-of-a-page")
    async with visitors.visit("operator") as visit:
        await visit.page.goto("/")
        for word in ("call-of-a-page", task):
            await visit.page.get_by_label("Find a call").fill(word)
            await visit.page.get_by_role("button", name="Show", exact=True).last.click()
            await expect(visit.page.get_by_role("heading", level=1)).to_contain_text("call-of-a-page")
            await expect(visit.page.get_by_text("by worker")).to_contain_text("in sandbox box-1")
            link = visit.page.get_by_role("link", name=f"{task} in Flower")
            assert await link.get_attribute("href") == f"{FLOWER}/task/{task}"
            await take_picture(visit.page, "call")
            await visit.page.goto("/")
    async with visitors.visit("rival") as visit:
        visit.expected = (404,)
        pages = [await visit.page.request.get(f"/calls/{word}") for word in ("call-of-a-page", task, "no-such-call")]
        assert [page.status for page in pages] == [404, 404, 404]
        assert len({await page.text() for page in pages}) == 1


async def test_calls_are_listed_and_a_waiting_call_is_killed_from_the_list(world: World, visitors: Visitors) -> None:
    await world.add_call("ended-call")
    await world.add_call("lost-queue", state="queued")
    await world.add_call("rivals-call", tenant="rival")
    async with visitors.visit("acme") as visit:
        await visit.page.goto("/calls")
        await expect(visit.page.get_by_role("row", name="ended-call")).to_contain_text("TIMEOUT")
        await expect(visit.page.get_by_text("rivals-call")).to_have_count(0)
        await expect(visit.page.get_by_role("button", name="Kill call ended-call")).to_have_count(0)
        await take_picture(visit.page, "calls")
        await visit.page.get_by_role("button", name="Kill call lost-queue").click()
        await expect(visit.page.get_by_role("heading", level=1)).to_contain_text("forbidden")
        await expect(visit.page.get_by_text("CANCELLED")).to_be_visible()


async def test_a_batch_is_read_item_by_item_and_step_by_step(world: World, visitors: Visitors) -> None:
    await world.submit_batch("acme", "read-batch", attempts=[(name, Attempt()) for name in ("good", "bad", "open")])
    claims = {claim.record.item.custom_id: claim for claim in await world.queue.claim(100) if "read-batch" in claim.run}
    for name, failure in (("good", None), ("bad", Failure(kind=FailureKind.MODEL, code="empty", message="no words"))):
        claim = claims[name]
        log = await RunLog.load(world.redis, DEPLOYMENT, world.queue.keys, claim.attempt)
        text = {"choices": [{"index": 0, "delta": {"content": f"step of {name}"}, "finish_reason": "stop"}]}
        await log.append(ModelReplied(run=claim.run, at=1.0, chunks=(text,)))
        outcome = ItemOutcome(custom_id=name, run=claim.run, status_code=200, body={"answer": "42"}, failure=failure)
        assert await world.queue.finish(claim, outcome)
    async with visitors.visit("acme") as visit:
        page = visit.page
        await page.goto("/batches/read-batch")
        await page.get_by_role("link", name="All items").click()
        await expect(page.get_by_role("row", name="good")).to_contain_text("42")
        await expect(page.get_by_role("row", name="open")).to_contain_text("running")
        await take_picture(page, "batch-items")
        await page.get_by_role("link", name="failed", exact=True).click()
        await expect(page.get_by_role("row", name="good")).to_have_count(0)
        await page.get_by_role("link", name="bad", exact=True).click()
        await expect(page.get_by_text("step of bad")).to_be_visible()
        await expect(page.get_by_text("no words")).to_be_visible()
        await take_picture(page, "batch-item")
    async with visitors.visit("rival") as visit:
        visit.expected = (404,)
        answer = await visit.page.request.get(f"/batches/read-batch/items/{claims['good'].run}")
        assert answer.status == 404


async def test_login_and_approval_work_with_the_keyboard_only(world: World, visitors: Visitors) -> None:
    question = await world.ask("make", number=5)
    async with visitors.visit() as visit:
        page = visit.page
        await page.goto("/login")
        # A browser sets the focus when it draws the page, possibly after the page has loaded. Earlier key presses
        # reach no element.
        await expect(page.get_by_label("API key")).to_be_focused()
        await page.keyboard.type(visitors.api.keys["acme"])
        await page.keyboard.press("Enter")
        await page.wait_for_url(lambda url: "/login" not in url)
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.textContent") == "Skip to the content"
        await page.keyboard.press("Enter")
        await page.wait_for_function("document.activeElement.id === 'main'")
        await page.goto(f"/approvals/{question.id}")
        await tab_to(page, "Reason (the model reads it)")
        await page.keyboard.type("no")
        await tab_to(page, "Deny bash_tool")
        await page.keyboard.press("Enter")
        await page.wait_for_url("**/approvals?*")
    assert (await read_answer(world, question)).answer.reason == "no"


async def test_a_revoked_key_ends_its_login_and_open_pages_report_it(world: World, visitors: Visitors) -> None:
    key = await world.add_key("acme")
    async with visitors.visit() as visit:
        await log_in(visit.page, key.text)
        await visit.page.goto("/runs")
        await world.revoke_key(key)
        visit.expected = (401,)
        await expect(visit.page.locator("#live-state")).to_contain_text("You are logged out")
        await visit.page.goto("/runs?state=failed")
        assert visit.page.url.endswith("/login?next=%2Fruns%3Fstate%3Dfailed")
        await visit.page.get_by_label("API key").fill(visitors.api.keys["acme"])
        await visit.page.get_by_role("button", name="Log in").click()
        await visit.page.wait_for_url("**/runs?state=failed")
        await visit.page.get_by_role("button", name="Log out").click()
        await visit.page.wait_for_url("**/login")
        await visit.page.goto("/")
        assert "/login" in visit.page.url
