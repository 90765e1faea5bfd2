"""Checks the tools that a batch names, and the arguments of its calls, before any item is queued."""

import difflib
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from toolcrew.contract.errors import ToolFailure
from toolcrew.contract.schema import MAX_NAME_CHARS, prepare_arguments
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.batches.lines import MAX_SHOWN, BadBatch, BatchFile, LineError
from toolcrew.orchestrator.terminal.commands import build_command
from toolcrew.store.batches import BatchItem, CallBody

NOT_CHECKED = "no worker is online, so the names and arguments of tools were not checked"
MIN_LIKENESS = 0.6
CHECK_S = 20.0
"""Processor time for the check of a whole batch, in seconds. The arguments of each call are checked again before the
call is sent.
"""


def check_tools(
    file: BatchFile, specs: Iterable[ToolSpec], exists: Callable[[str], bool], name: str, tenant: str
) -> list[str]:
    """Check the tools and arguments. Return warnings about arguments that use an alias of their parameter.

    `specs`: tools of `tenant`. `exists`: returns whether a tool exists that no worker serves now. `name`: the file
    name in messages. Raises BadBatch: a line names a tool that does not exist, or a call has invalid arguments.
    """
    tools = {spec.name: spec for spec in specs if spec.audience == "model"}
    aliases: dict[tuple[str, str], list[int]] = {}
    errors: list[LineError] = []
    more, unchecked = 0, 0
    began = time.thread_time()
    for item in file.items:
        if time.thread_time() - began > CHECK_S:
            unchecked = item.line
            break
        for problem in _problems(item, tools, exists, aliases, tenant):
            if len(errors) < MAX_SHOWN:
                errors.append(LineError(problem, item.line))
            else:
                more += 1
    if errors:
        raise BadBatch(name, errors, more)
    warnings = [_alias_warning(tool, alias, lines) for (tool, alias), lines in aliases.items()]
    if unchecked:
        warnings.append(
            f"tools and arguments from line {unchecked} on were not checked: the check reached its limit of "
            f"{CHECK_S:g} s"
        )
    return warnings


def find_unknown_tools(
    item: BatchItem, tools: Collection[str], exists: Callable[[str], bool], tenant: str
) -> Iterator[str]:
    """Yield a sentence for each tool of an item that does not exist. `tools`: names of the tools that `tenant` has.
    `exists`: as for `check_tools`.
    """
    work = item.work
    for tool in (work.name,) if isinstance(work, CallBody) else work.tools or ():
        if tool not in tools and tool != "all" and not exists(tool):
            yield f"the tool {tool[:MAX_NAME_CHARS]} does not exist: {suggest_tool(tool, tools, tenant)}"


def suggest_tool(name: str, tools: Iterable[str], tenant: str) -> str:
    """Return `did you mean ...?`, or the command that lists the tools if no name is similar."""
    close = difflib.get_close_matches(name, list(tools), n=1, cutoff=MIN_LIKENESS)
    return (
        f"did you mean {close[0]}?" if close else f"`{build_command('tools', 'list', tenant=tenant)}` lists the tools"
    )


def _problems(
    item: BatchItem,
    tools: dict[str, ToolSpec],
    exists: Callable[[str], bool],
    aliases: dict[tuple[str, str], list[int]],
    tenant: str,
) -> Iterator[str]:
    """Yield the problems of one item. Adds the aliases that its arguments use to `aliases`."""
    work = item.work
    yield from find_unknown_tools(item, tools, exists, tenant)
    if not isinstance(work, CallBody) or (spec := tools.get(work.name)) is None:
        return
    try:
        _, used = prepare_arguments(spec, work.arguments)
    except ToolFailure as failure:
        yield f"`arguments` are invalid for the tool: {failure.message}"
        return
    for alias in used:
        aliases.setdefault((spec.name, alias), []).append(item.line)


def _alias_warning(tool: str, alias: str, lines: list[int]) -> str:
    """Return the warning about an alias. `alias`: "given -> canonical"."""
    used_name, _, canonical = alias.partition(" -> ")
    position = f"line {lines[0]}" if len(lines) == 1 else f"line {lines[0]} and {len(lines) - 1} more"
    return f"{position}: `{used_name}` is an alias of the parameter `{canonical}` of {tool}"
