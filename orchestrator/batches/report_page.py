"""HTML page of a report: one file that has no scripts and loads nothing.

Security: the Content-Security-Policy of the page forbids scripts and external resources, even if an escape were
missing.
"""

from collections.abc import Sequence

from orchestrator.batches.markup import NOTHING, Markup, element, text

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE = Markup("""
:root { color-scheme: light dark; --back: #fff; --text: #1a1f26; --soft: #5a6572; --rule: #d5dae1;
  --done: #1a7f4b; --failed: #c0342b; --other: #a86400; --third: #2a62c9; }
@media (prefers-color-scheme: dark) { :root { --back: #14181d; --text: #e6e9ed; --soft: #a2adba; --rule: #38414c;
  --done: #4cc38a; --failed: #ff8075; --other: #f0b150; --third: #85b0ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--back); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; }
h1, h2 { line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--rule); padding-bottom: .3rem; }
a { color: var(--third); } nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; padding: 0; }
figure { margin: 1rem 0; } figcaption { color: var(--soft); font-size: .9rem; }
.scroll { overflow-x: auto; }
.scroll:focus-visible, a:focus-visible { outline: 3px solid var(--third); outline-offset: 2px; }
svg { display: block; width: 100%; min-width: 35rem; height: auto; font: 12px system-ui, sans-serif; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .4rem 0; }
th, td { text-align: left; vertical-align: top; padding: .25rem 1.2rem .25rem 0;
  border-bottom: 1px solid var(--rule); }
.number { text-align: right; white-space: nowrap; } td.words:last-child { min-width: 14rem; }
.tick { fill: var(--soft); } .middle { text-anchor: middle; } .end { text-anchor: end; }
.axis { stroke: var(--soft); } .grid { stroke: var(--rule); stroke-width: .5; }
.line { fill: none; stroke-width: 2; stroke: var(--done); }
.line.failed { stroke: var(--failed); stroke-dasharray: 6 3; }
.line.other { stroke: var(--other); } .line.third { stroke: var(--third); stroke-dasharray: 2 3; }
@media print { .scroll { overflow: visible; } svg { min-width: 0; } }
""")


def build_page(title: str, sections: Sequence[tuple[str, str, Markup]]) -> str:
    """Return the page. `sections`: (id, heading, content)."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name_="referrer", content="no-referrer"),
        element("title", text(title)),
        element("style", STYLE),
    )
    links = [element("li", element("a", text(heading), href=f"#{name}")) for name, heading, _ in sections]
    blocks = [element("section", element("h2", text(heading), id=name), content) for name, heading, content in sections]
    nav = element("nav", element("ul", *links), aria_label="Sections")
    main = element("main", element("h1", text(title)), nav, *blocks)
    return f"<!DOCTYPE html>\n{element('html', head, element('body', main), lang='en')}\n"


def figure(plot: Markup, caption: str) -> Markup:
    """Return a plot with its caption. The plot scrolls on a narrow screen."""
    box = element("div", plot, class_="scroll", tabindex="0", role="region", aria_label=caption)
    return element("figure", box, element("figcaption", text(caption, 1000)))


def table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    text_columns: Sequence[int] = (0,),
    max_chars: int = 200,
) -> Markup:
    """Return a table of untrusted text.

    `max_chars`: maximum number of characters in a cell. `text_columns`: columns that contain text and not numbers. The
    first column is the heading of the row.
    """
    styles = ["words" if number in text_columns else "number" for number in range(len(columns))]
    names = [element("th", text(name), scope="col", class_=style) for name, style in zip(columns, styles, strict=True)]
    body = []
    for row in rows:
        first = element("th", text(row[0], max_chars), scope="row", class_=styles[0])
        rest = [
            element("td", text(cell, max_chars), class_=style) for cell, style in zip(row[1:], styles[1:], strict=True)
        ]
        body.append(element("tr", first, *rest))
    parts = element("caption", text(caption)), element("thead", element("tr", *names)), element("tbody", *body)
    return element("div", element("table", *parts), class_="scroll", tabindex="0", role="region", aria_label=caption)


def paragraph(sentence: str) -> Markup:
    """Return a paragraph; nothing for an empty sentence."""
    return element("p", text(sentence, 1000)) if sentence else NOTHING
