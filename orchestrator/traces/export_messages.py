"""A trace as chat messages: as OpenAI's API takes them, and as trajectories of mini-swe-agent 1.1 and SWE-agent in one
document.
"""

import json
from typing import Any

from orchestrator.traces import records
from orchestrator.traces.export_atif import split_thinking
from orchestrator.traces.reading import Trace, TraceCall, TraceStep, seconds_of

TRAJECTORY_FORMAT = "mini-swe-agent-1.1"


def build_openai(trace: Trace) -> dict[str, Any]:
    """`messages`: what the model was last shown, its reply, and the results that nobody showed it any more; `tools`
    where there were any.
    """
    found: dict[str, Any] = {"messages": build_messages(trace)}
    return {**found, "tools": trace.tools} if trace.tools else found


def build_traj(trace: Trace) -> dict[str, Any]:
    """`info` and `messages` as mini-swe-agent's format 1.1 has them, `trajectory` and `history` as a `.traj` of
    SWE-agent.
    """
    status = _exit_status(trace)
    answer = trace.end.answer if trace.end else ""
    extra = {"exit_status": status, "submission": answer}
    messages = build_messages(trace)
    info: dict[str, Any] = {
        **extra,
        "model_stats": _model_stats(trace),
        "config": _config(trace),
        "faults": trace.faults(),
    }
    return {
        "trajectory_format": TRAJECTORY_FORMAT,
        "info": info,
        "messages": [*_with_actions(trace, messages), {"role": "exit", "content": answer, "extra": extra}],
        "trajectory": [turn for step in trace.steps for turn in _turns(step)],
        "history": messages,
        "environment": "toolcrew",
    }


def build_messages(trace: Trace) -> list[dict[str, Any]]:
    """The conversation to its end."""
    if not trace.steps:
        return [{"role": "user", "content": trace.start.instruction}] if trace.start else []
    last = trace.steps[-1]
    messages = list(last.messages)
    if last.response is not None:
        messages.append(last.response.message)
    return messages + _unshown(last)


def _unshown(step: TraceStep) -> list[dict[str, Any]]:
    """The results of the last step. Its native calls need an answer each; results of calls by text are told as text."""
    results = [call.result for call in step.calls if call.result is not None]
    entries = (step.response.message.get("tool_calls") if step.response else None) or []
    if isinstance(entries, list) and len(entries) == len(step.calls):
        pairs = zip(entries, step.calls, strict=True)
        return [
            {
                "role": "tool",
                "tool_call_id": entry.get("id", call.call_id),
                "content": call.result.text() if call.result else "no result",
            }
            for entry, call in pairs
        ]
    text = "\n\n".join(f"Tool result for {result.tool}:\n{result.text()}" for result in results)
    return [{"role": "user", "content": text}] if text else []


def _exit_status(trace: Trace) -> str:
    if trace.end is None:
        return "unfinished"
    return trace.end.stop_reason or "aborted"


def _model_stats(trace: Trace) -> dict[str, Any]:
    end = trace.end
    calls = sum(isinstance(record, records.LlmResponse) for record in trace.attempt)
    sent, received = (end.prompt_tokens, end.completion_tokens) if end else (0, 0)
    # 0.0 is what these formats have where no prices are known.
    return {
        "instance_cost": (end.cost if end else None) or 0.0,
        "api_calls": calls,
        "tokens_sent": sent,
        "tokens_received": received,
    }


def _config(trace: Trace) -> dict[str, Any]:
    if trace.start is None:
        return {}
    model = {"model_name": trace.start.model}
    return {
        "agent_type": "toolcrew",
        "agent": {"release": trace.start.release, "dialect": trace.start.dialect},
        "model": model,
    }


def _with_actions(trace: Trace, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replies of this run with what they had done, as mini-swe-agent keeps it beside each."""
    steps = [step for step in trace.steps if step.response is not None]
    replies = (
        [at for at, message in enumerate(messages) if message.get("role") == "assistant"][-len(steps) :]
        if steps
        else []
    )
    told = list(messages)
    for at, step in zip(reversed(replies), reversed(steps), strict=False):
        actions = [{"command": build_action(call), "tool_call_id": call.call_id} for call in step.calls]
        extra: dict[str, Any] = {"actions": actions, "step": step.number}
        if step.response is not None:
            extra["timestamp"] = seconds_of(step.response.ts)
        told[at] = {**messages[at], "extra": extra}
    return told


def _turns(step: TraceStep) -> list[dict[str, Any]]:
    """One for each call; a reply without any is a turn of its own."""
    message = step.response.message if step.response else {}
    text, thought = split_thinking(message)
    response = message.get("content") or ""
    shown = {"thought": thought or text, "response": response, "query": step.messages, "messages": step.messages}
    if not step.calls:
        return [{**shown, "action": "", "observation": "", "state": {}, "execution_time": 0.0}]
    turns = []
    for call in step.calls:
        result = call.result
        state = {key: result.metadata[key] for key in ("cwd", "exit_code") if key in result.metadata} if result else {}
        told = {"action": build_action(call), "observation": result.text() if result else "", "state": state}
        turns.append(
            {
                **shown,
                **told,
                "execution_time": (result.seconds or 0.0) if result else 0.0,
                "extra_info": {"call_id": call.call_id},
            }
        )
    return turns


def build_action(call: TraceCall) -> str:
    """A call as one text: the command of a tool that runs one, else its name and arguments."""
    command = call.arguments.get("command")
    return command if isinstance(command, str) else f"{call.tool} {json.dumps(call.arguments, ensure_ascii=False)}"
