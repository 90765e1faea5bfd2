"""Random texts around tag calls: complete calls in every form, calls with a few wrong characters, and random pieces
of the grammar.
"""

from random import Random

from toolcrew.orchestrator.dialects.tag_values import build_tag_call, escape_value

PIECES = (
    "<tool_action", "<tool_action", ' name="t"', " name='u'", ' name="t">', ">", ">", "/>", "<v", "<v>", ' value="', " value='", '"', "'", "</v>",
    "</tool_action>", "</tool_action>", "</tool_action", "</", "<", "/", "=", " ", "\n", "\r\n", "<![CDATA[", "]]>", "]", "<!--", "-->", "-", "!",
    "{", "&quot;", "&#", "x", "<w", "</w>", "<think>", "</think>", "```", "~~~", "`", "    ", "tool_action", "word=", "-w=", "w", "中", "\ud800",
    "\udc00", "\0", '<tool_action name="t"><v value="', "<tool_action name='t'><v>", '<tool_action name="a"/>',
)  # fmt: skip
_NAME_CHARACTERS = "abv-_.:1中é"
_VALUE_PIECES = (
    "a", "b", " ", "\n", "\t", '"', "'", "&", "<", ">", "/", "<b>", "</b>", "&lt;", "&amp;", "]]>", "中", "\U0001f600", "\0", "{}", "x=1", "```",
    "</tool_action>", "<tool_action ", "/>",
)  # fmt: skip


def hostile_text(random: Random) -> str:
    return "".join(random.choices(PIECES, k=random.randrange(1, 24)))


def random_name(random: Random) -> str:
    return "".join(random.choices(_NAME_CHARACTERS, k=random.randrange(1, 6)))


def random_value(random: Random) -> str:
    return "".join(random.choices(_VALUE_PIECES, k=random.randrange(8)))


def random_arguments(random: Random) -> dict[str, str]:
    return {random_name(random): random_value(random) for _ in range(random.randrange(4))}


def written_call(random: Random, name: str, arguments: dict[str, str]) -> str:
    """Return the call in randomly chosen forms, each of which has exactly the same values."""
    if random.random() < 0.3:
        return build_tag_call(name, arguments)
    blank = random.choice(("", " ", "\n", "\r\n  "))
    quote = random.choice("\"'")
    header = (
        f"<tool_action{random.choice(('', ' id=7x7 '.replace('7', quote)))} "
        f"name={quote}{escape_value(name)}{quote}{blank}"
    )
    if not arguments:
        return header + random.choice(("/>", "></tool_action>"))
    children = "".join(blank + _written_child(random, key, value) for key, value in arguments.items())
    comment = random.choice(("", "<!-- </tool_action> -->", ""))
    return f"{header}>{children}{comment}{blank}</tool_action{blank}>"


def _written_child(random: Random, key: str, value: str) -> str:
    forms = [f'<{key} value="{escape_value(value)}"/>', f"<{key}\nvalue = '{escape_value(value)}' />"]
    forms.append(f'<{key} value="{escape_value(value)}" > </{key}>')
    if not value:
        forms += [f"<{key}/>", f"<{key} />", f"<{key}></{key}>"]
    elif "]]>" not in value:
        forms.append(f"<{key}><![CDATA[{value}]]></{key}>")
    if f"</{key}" not in value and not value.lstrip().startswith("<![CDATA["):
        forms.append(f"<{key}>\n{value}\n</{key}>")
    return random.choice(forms)


def damaged(random: Random, text: str) -> str:
    """Return `text` with up to three places deleted, doubled or replaced."""
    for _ in range(random.randrange(1, 4)):
        start = random.randrange(len(text) + 1)
        end = min(len(text), start + random.randrange(4))
        text = text[:start] + random.choice(("", text[start:end] * 2, random.choice(PIECES))) + text[end:]
    return text


def random_cuts(random: Random, text: str) -> list[str]:
    """Return the text in chunks: all of one size, or of sizes around one, including empty chunks."""
    size = random.choice((1, 1, 2, 3, 4, 7, 16, 40))
    if random.random() < 0.5:
        return [text[start : start + size] for start in range(0, len(text), size)]
    chunks, start = [], 0
    while start < len(text):
        end = start + random.randrange(2 * size + 1)
        chunks.append(text[start:end])
        start = end
    return chunks
