"""Properties of every page: the page is complete, no injected code runs, and the page works on a phone, in dark mode
and with a screen reader.
"""

import pytest

from tests.support.api.page_harness import DEPLOYMENT, Visitors, World, take_picture
from toolcrew.orchestrator.dialects.model import TokenUsage
from toolcrew.store.usage import ReplySpending, UsageStore

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATHS = (
    "/",
    "/runs",
    "/runs/RUN?of=acme",
    "/runs/RUN/transcript?of=acme",
    "/calls",
    "/calls/CALL?of=acme",
    "/approvals",
    "/approvals/QUESTION",
    "/batches",
    "/batches/acme-batch?of=acme",
    "/batches/acme-batch/items?of=acme",
    "/batches/acme-batch/items/acme-batch-2?of=acme",
    "/sessions",
    "/tools",
    "/tenants",
    "/models",
    "/secrets",
    "/usage",
    "/hosts",
    "/audit",
)
FAULTS = """() => {
  const found = [];
  const name = (one) => one.getAttribute('aria-label') || (one.getAttribute('aria-labelledby') || '').split(' ').map((id) => document.getElementById(id)?.textContent || '').join(' ')
    || (one.labels && one.labels.length ? one.labels[0].textContent : '') || one.textContent || one.title || one.alt || '';
  if (document.documentElement.lang !== 'en') found.push('no language');
  if (!document.title.trim()) found.push('no title');
  if (document.querySelectorAll('h1').length !== 1) found.push('not one h1');
  if (document.querySelectorAll('main').length !== 1) found.push('not one main');
  let level = 1;
  for (const one of document.querySelectorAll('h1, h2, h3, h4')) {
    const now = Number(one.tagName[1]);
    if (now > level + 1 && level > 0) found.push('a heading of level ' + now + ' after ' + level + ': ' + one.textContent.slice(0, 40));
    level = now;
  }
  for (const one of document.querySelectorAll('input:not([type=hidden]), select, textarea, button, a[href], [role=img], [role=region]'))
    if (!name(one).trim()) found.push('without a name: ' + one.outerHTML.slice(0, 120));
  const ids = [...document.querySelectorAll('[id]')].map((one) => one.id);
  for (const id of new Set(ids)) if (ids.filter((other) => other === id).length > 1) found.push('id twice: ' + id);
  for (const one of document.querySelectorAll('[aria-labelledby], [aria-describedby]'))
    for (const id of (one.getAttribute('aria-labelledby') || one.getAttribute('aria-describedby')).split(' ')) if (!document.getElementById(id)) found.push('no element ' + id);
  for (const one of document.querySelectorAll('table')) if (one.querySelectorAll('tbody tr').length && !one.querySelector('th[scope]')) found.push('a table without headings');
  for (const one of document.querySelectorAll('[tabindex]')) if (Number(one.getAttribute('tabindex')) > 0) found.push('an order of its own: ' + one.outerHTML.slice(0, 80));
  for (const one of document.querySelectorAll('*')) {
    if (one.hasAttribute('style') || [...one.attributes].some((attribute) => attribute.name.startsWith('on'))) found.push('style or script in ' + one.outerHTML.slice(0, 80));
    if (one.tagName === 'A' && !/^https?:/.test(one.href)) found.push('a link to ' + one.href);
    if (['SCRIPT', 'IMG', 'IFRAME', 'OBJECT', 'LINK', 'EMBED'].includes(one.tagName) && one.src !== undefined && one.src && !one.src.startsWith(location.origin)) found.push('loads ' + one.src);
  }
  return found;
}"""
CONTRASTS = """() => {
  const parse = (text) => { const found = text.match(/[\\d.]+/g).map(Number); return { c: found.slice(0, 3), a: found.length > 3 ? found[3] : 1 }; };
  const light = (c) => { const [r, g, b] = c.map((v) => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; }); return .2126 * r + .7152 * g + .0722 * b; };
  const behind = (one) => { for (let at = one; at; at = at.parentElement) { const back = parse(getComputedStyle(at).backgroundColor); if (back.a === 1) return back.c; } return [255, 255, 255]; };
  const low = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const one = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || one.closest('svg, script, .hidden, .skip, option')) continue;
    const style = getComputedStyle(one);
    const [a, b] = [light(parse(style.color).c), light(behind(one))];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    const isLarge = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (isLarge ? 3 : 4.5)) low.push(ratio.toFixed(2) + ' ' + one.className + ': ' + walker.currentNode.textContent.trim().slice(0, 40));
  }
  return low;
}"""
IS_TOO_WIDE = "(width) => document.documentElement.scrollWidth > width"
WIDER = """() => [...document.querySelectorAll('body *')].filter((one) => {
  const box = one.getBoundingClientRect();
  if (!box.width || !box.height || one.closest('.skip, .hidden, thead, pre, .scroll, .said, svg')) return false;
  return box.right > window.innerWidth + 1 || box.left < -1;
}).map((one) => one.outerHTML.slice(0, 120))"""


def address(path: str, world: World) -> str:
    return path.replace("RUN", world.done).replace("QUESTION", world.question).replace("CALL", world.call)


def picture(kind: str, path: str) -> str:
    return f"{kind}-{path.partition('?')[0].strip('/').replace('/', '-') or 'overview'}"


async def test_every_page_is_complete_and_runs_no_injected_script(world: World, visitors: Visitors) -> None:
    async with visitors.visit("admin") as visit:
        for path in PATHS:
            response = await visit.page.goto(address(path, world))
            assert response is not None
            assert (path, response.status) == (path, 200)
            assert (path, await visit.page.evaluate("window.owned")) == (path, None)
            assert (path, await visit.page.evaluate(FAULTS)) == (path, [])
            assert (path, await visit.page.evaluate(CONTRASTS)) == (path, [])
            await take_picture(visit.page, picture("wide", path))


# The light colours of a wide window are checked above.
@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (400, "dark"), (1000, "light"), (1400, "dark")])
async def test_no_page_is_wider_than_its_window(world: World, visitors: Visitors, width: int, scheme: str) -> None:
    is_phone = width < 600
    options = {"viewport": {"width": width, "height": 800}, "is_mobile": is_phone, "has_touch": is_phone}
    async with visitors.visit("admin", color_scheme=scheme, **options) as visit:
        for path in PATHS:
            await visit.page.goto(address(path, world))
            assert (path, await visit.page.evaluate(IS_TOO_WIDE, width)) == (path, False)
            assert (path, await visit.page.evaluate(WIDER)) == (path, [])
            assert (path, await visit.page.evaluate(CONTRASTS)) == (path, [])
            await take_picture(visit.page, picture(f"{width}-{scheme}", path))


async def test_a_tenant_sees_its_own_usage_and_budgets(world: World, visitors: Visitors) -> None:
    async with visitors.visit("acme") as visit:
        await visit.page.goto("/usage")
        assert await visit.page.get_by_role("rowheader", name="tokens per day", exact=True).count() == 1
        labels = [await one.get_attribute("aria-label") for one in await visit.page.locator(".days svg").all()]
        assert labels == ["Model tokens per day, 1,234 in 30 days", "Model cost per day, 1.5 in 30 days"]
        assert await visit.page.get_by_text("98,765").count() == 0


async def test_the_default_tenant_is_on_the_pages_of_tenants_and_usage(world: World, visitors: Visitors) -> None:
    await UsageStore(world.redis, DEPLOYMENT).count_reply("default", "s", ReplySpending(TokenUsage(4321, 0)))
    async with visitors.visit("admin") as visit:
        await visit.page.goto("/usage")
        assert await visit.page.get_by_role("heading", name="default", exact=True).count() == 1
        assert await visit.page.get_by_text("4,321 in 30 days").count() == 1
        await visit.page.goto("/tenants")
        row = visit.page.get_by_role("row").filter(has=visit.page.get_by_role("rowheader", name="default", exact=True))
        assert await row.get_by_role("button", name="Pause").count() == 1


async def test_the_count_of_active_runs_agrees_with_their_list(world: World, visitors: Visitors) -> None:
    async with visitors.visit("admin") as visit, world.open_run("Watch me"):
        await visit.page.goto("/")
        rows = visit.page.get_by_role("table").first.locator("tbody tr")
        tiles = dict(
            zip(
                await visit.page.locator(".figure dt").all_inner_texts(),
                await visit.page.locator(".figure dd").all_inner_texts(),
                strict=True,
            )
        )
        assert int(tiles["Active runs"]) == await rows.count() == 1


async def test_pages_show_the_same_content_without_javascript(world: World, visitors: Visitors) -> None:
    async with visitors.visit("admin", java_script_enabled=False) as visit:
        await visit.page.goto(address("/runs/RUN?of=acme", world))
        assert await visit.page.get_by_text("total 3").count()
        assert await visit.page.get_by_text("3 processes killed").count()
        await visit.page.get_by_role("link", name="Transcript with every message").click()
        await visit.page.get_by_role("heading", name="Transcript").wait_for()
        await visit.page.goto("/hosts")
        await visit.page.get_by_text("Take out of service…").first.click()
        await visit.page.get_by_role("button", name="Drain").first.wait_for()


async def test_a_tenant_key_shows_its_own_pages_and_no_operator_pages(world: World, visitors: Visitors) -> None:
    async with visitors.visit("acme") as visit:
        request = visit.page.context.request
        for path in PATHS:
            response = await request.get(address(path, world))
            assert (path, response.status) == (path, 403 if path in ("/hosts", "/audit") else 200)
            assert "rival" not in await response.text()
        await visit.page.goto("/")
        names = await visit.page.get_by_role("navigation", name="Pages").get_by_role("link").all_inner_texts()
        assert not {"Hosts", "Audit"} & set(names)
        assert {"Overview", "Tenants", "Usage", "Models", "Secrets"} <= set(names)
