"""The meaning of a server's refusal: requests that are too long, in the wording of every server, and the distinction
between errors.
"""

from typing import Any

import pytest

from contract.errors import (
    ContextWindowExceeded,
    ModelRefused,
)
from orchestrator.models.failures import (
    AttemptFailure,
    FailedEndpoint,
    build_error,
    find_limit_tokens,
    is_transient,
)

ENDPOINT = FailedEndpoint("http://host/v1", "m", "sk-secret")

TOO_LONG: list[tuple[int, Any, int | None]] = [
    (400, {"message": "Your input exceeds the context window of this model.", "code": "context_length_exceeded"}, None),
    (
        400,
        {
            "message": (
                "This model's maximum context length is 128000 tokens. However, your messages resulted in 130000 "
                "tokens."
            )
        },
        128000,
    ),
    (400, {"message": "cut", "type": "exceed_context_size_error", "n_prompt_tokens": 1407, "n_ctx": 256}, 256),
    (
        400,
        {"message": "request (9412 tokens) exceeds the available context size (8192 tokens), try increasing it"},
        8192,
    ),
    (
        500,
        {"message": "the request exceeds the available context size. try increasing the context size", "code": 500},
        None,
    ),
    (
        400,
        {
            "message": (
                "This model's maximum context length is 6048 tokens. However, you requested 6616 tokens (568 in the "
                "messages)"
            )
        },
        6048,
    ),
    (
        400,
        {
            "message": (
                "You passed 5000 input tokens and requested 9 output tokens. However, the model's context length is "
                "only 4096"
            )
        },
        4096,
    ),
    (400, {"message": "The decoder prompt (length 5000) is longer than the maximum model length of 4096."}, 4096),
    (400, {"message": "The input (5000 tokens) is longer than the model's context length (4096 tokens)."}, 4096),
    (400, {"message": "the input length exceeds the context length"}, None),
    (400, {"message": "prompt too long; exceeded max context length by 120 tokens"}, None),
    (500, {"message": "Requested tokens (516) exceed context window of 512"}, 512),
    (400, {"message": "Prompt contains 40000 tokens, too large for model with 32768 maximum context length"}, 32768),
    (400, {"message": "prompt is too long: 210000 tokens > 200000 maximum"}, 200000),
    (400, {"message": "The input token count (1190) exceeds the maximum number of tokens allowed (1000)."}, 1000),
    (422, {"message": "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000"}, 4096),
    (400, {"message": "This model's maximum prompt length is 131072 but the request contains 137032 tokens."}, 131072),
    (413, {"message": "Please reduce the length of the messages or completion."}, None),
    (400, "<p>maximum context length is 77 tokens</p>", 77),
]


@pytest.mark.parametrize(("status", "body", "limit"), TOO_LONG)
def test_a_too_long_request_is_recognised_for_each_server(status: int, body: Any, limit: int | None) -> None:
    failure = AttemptFailure("status", status, body)
    error = build_error(failure, ENDPOINT)
    assert isinstance(error, ContextWindowExceeded)
    assert error.limit_tokens == limit
    assert not is_transient(failure)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "max_tokens must be at least 1"),
        (400, "messages with role 'tool' must be a response to a preceding message with 'tool_calls'"),
        (429, "Rate limit reached: the maximum context length is 10 tokens a minute"),
        (404, "the model `maximum context length` does not exist"),
        (500, "The server had an error while processing your request"),
        (422, "context: field required"),
    ],
)
def test_other_refusals_are_not_taken_for_it(status: int, message: str) -> None:
    assert not isinstance(
        build_error(AttemptFailure("status", status, {"message": message}), ENDPOINT), ContextWindowExceeded
    )


def test_a_limit_of_a_million_digits_is_none() -> None:
    assert (
        find_limit_tokens(
            AttemptFailure("status", 400, {"message": f"maximum context length is {'9' * 100_000} tokens"})
        )
        is None
    )


@pytest.mark.parametrize("status", [400, 413, 422, 501])
def test_a_request_that_is_refused_for_what_is_in_it_says_why_without_the_key(status: int) -> None:
    error = build_error(AttemptFailure("status", status, {"message": "no sk-secret\nhere"}), ENDPOINT)
    assert isinstance(error, ModelRefused)
    assert error.detail == "no *** here"


@pytest.mark.parametrize(
    "body", [None, [], 7, "", {"message": None}, {"message": {"a": 1}}, {"code": None, "type": []}]
)
def test_bodies_of_any_shape_make_a_sentence(body: Any) -> None:
    assert "http://host/v1" in str(build_error(AttemptFailure("status", 400, body), ENDPOINT))
    assert is_transient(AttemptFailure("status", 503, body))


def test_a_reason_that_nests_deeper_than_can_be_written_is_none() -> None:
    body: dict[str, Any] = {}
    for _ in range(5000):
        body = {"message": body}
    assert "nested too deep" in str(build_error(AttemptFailure("status", 400, body), ENDPOINT))


def test_the_key_is_in_no_representation_of_its_endpoint() -> None:
    assert "sk-secret" not in repr(ENDPOINT)
