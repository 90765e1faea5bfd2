"""What a server's `finish_reason` says about the end of a reply. Servers use the words of their own models."""

import re
from enum import StrEnum

MAX_CHARS = 64
"""Longest finish_reason that is kept. The rest of a longer one is cut off."""


class ReplyEnding(StrEnum):
    """How a reply ended. Only a `normal` one may be the answer of a run."""

    NORMAL = "normal"
    CUT = "cut"
    """At a limit of tokens, or of the context window."""
    FILTERED = "filtered"
    """A filter of the provider withheld the reply, or a part of it."""
    REFUSED = "refused"
    """The model refused to answer."""
    FAILED = "failed"
    """The server failed while it wrote the reply."""
    BAD_CALL = "bad_call"
    """The model wrote a call that the server could not read."""
    UNKNOWN = "unknown"
    """The server's word is in none of the lists below, so it does not prove a complete reply."""


_CALLS = "tool_calls tool_call tool_use function_call function_calls calls"
_WORDS = {
    ReplyEnding.NORMAL: (
        f"{_CALLS} stop eos eos_token eos_id end_turn end"
        " end_of_turn end_of_text stop_sequence stop_sequences stop_str stop_token stop_word complete completed finish"
        " eos_found stopped eot eot_id eom im_end finished done success null none"
    ),
    ReplyEnding.CUT: (
        "length max_tokens max_token max_length max_output_tokens max_completion_tokens max_new_tokens token_limit"
        " token_limit_reached model_length context_length context_window context_length_exceeded"
        " model_context_window_exceeded input_length incomplete truncated"
    ),
    ReplyEnding.FILTERED: (
        "content_filter content_filtered contentfilter filtered filter safety recitation blocklist prohibited_content"
        " spii language image_safety image_prohibited_content image_recitation sensitive moderation moderated blocked"
        " toxic error_toxic guardrail_intervened guardrails risk violation policy_violation model_armor"
    ),
    ReplyEnding.REFUSED: "refusal refused",
    ReplyEnding.FAILED: (
        "error errored server_error internal_error abort aborted cancel cancelled canceled failed failure network_error"
        " insufficient_system_resource overloaded engine_overloaded timeout time_limit interrupted rate_limit"
        " error_limit user_cancelled deadline_exceeded no_image image_other other"
    ),
    ReplyEnding.BAD_CALL: (
        "malformed_function_call malformed_tool_call unexpected_tool_call invalid_tool_call invalid_function_call"
        " function_call_filter tool_call_error too_many_tool_calls missing_thought_signature malformed_response"
    ),
}
_ENDINGS = {word: ending for ending, words in _WORDS.items() for word in words.split()}
_SEPARATORS = re.compile(r"[\s:;,./|]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def classify_ending(finish_reason: str | None, *, is_refusal: bool = False) -> ReplyEnding:
    """Return how a reply with that finish_reason ended. `is_refusal`: the reply has a text in its field `refusal`.

    None is a normal end, because some servers send none. A reason of several words (`function_call_filter:
    MALFORMED_FUNCTION_CALL`, `FinishReason.SAFETY`) means its last known word.
    """
    if is_refusal:
        return ReplyEnding.REFUSED
    if finish_reason is None:
        return ReplyEnding.NORMAL
    word = _find_word(finish_reason)
    return _ENDINGS[word] if word is not None else ReplyEnding.UNKNOWN


def announces_calls(finish_reason: str | None) -> bool:
    """Return whether the server says that the reply ended with calls."""
    return finish_reason is not None and _find_word(finish_reason) in _CALLS.split()


def _find_word(finish_reason: str) -> str | None:
    words = _SEPARATORS.split(_CAMEL.sub("_", finish_reason).replace("-", "_").lower())
    return next((word for word in reversed(words) if word in _ENDINGS), None)


def as_reason(value: object) -> str:
    """Return a server's finish_reason as a short text. Some servers send an object."""
    text = value if isinstance(value, str) else str(value)[:1000]
    return " ".join(text.split())[:MAX_CHARS]


def explain_ending(ending: ReplyEnding, finish_reason: str | None) -> str:
    """Return why the reply is no complete answer, as a part of a sentence."""
    named = f" (finish_reason {finish_reason})" if finish_reason else ""
    return {
        ReplyEnding.NORMAL: "the reply is complete",
        ReplyEnding.CUT: "the reply was cut at the model's token limit",
        ReplyEnding.FILTERED: f"a content filter stopped the reply{named}",
        ReplyEnding.REFUSED: "the model refused the request",
        ReplyEnding.FAILED: f"the model server failed during the reply{named}",
        ReplyEnding.BAD_CALL: f"the model server could not read the call of the model{named}",
        ReplyEnding.UNKNOWN: f"the reply ended with an unknown finish_reason ({finish_reason})",
    }[ending]
