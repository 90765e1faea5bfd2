"""webhook.send: posts a notice to a URL of a tenant. The rules of webfetch_tool apply."""

from typing import Any

from toolcrew.contract.specs import ToolSpec
from toolcrew.contract.webhooks import MAX_URL_CHARS, SEND_TOOL
from toolcrew.workers.tools.base import Outcome, ToolEnvironment, WorkerTool
from toolcrew.workers.web.access_rules import WebAccessRules
from toolcrew.workers.web.connections import build_tls
from toolcrew.workers.web.exchange import ConnectionOptions, HttpRequest, exchange
from toolcrew.workers.web.limits import Deadline, FetchLimits
from toolcrew.workers.web.resolver import Resolver, find_addresses
from toolcrew.workers.web.urls import parse_url

WEBHOOK_SPEC = ToolSpec(
    name=SEND_TOOL,
    description="Post a notice of the end of a run or batch.",
    parameters={
        "type": "object",
        "properties": {
            "url": {"type": "string", "minLength": 1, "maxLength": MAX_URL_CHARS},
            "headers": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 1024}},
            "body": {"type": "string", "maxLength": 64 * 1024},
            "check_only": {"type": "boolean"},
        },
        "required": ["url"],
        "additionalProperties": False,
    },
    timeout_s=20,
    max_timeout_s=20,
    idempotent=True,
    audience="session",
    pool="web",
)


def build_webhook(resolver: Resolver, rules: WebAccessRules) -> WorkerTool:
    """Return the tool. Redirects are not followed, and the body of the response is not read. With `check_only`, the
    tool only checks the URL, without a name lookup, so that a submission can refuse a URL that no delivery can reach.
    """
    bounds, context = FetchLimits(), build_tls()

    def handler(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
        deadline, target = Deadline(environment.context.timeout_s), parse_url(arguments["url"])
        rules.check_target(target)
        if arguments.get("check_only"):
            return Outcome()
        addresses = find_addresses(resolver, target, deadline, bounds)
        rules.check_addresses(target, addresses)
        request = HttpRequest(target, "POST", arguments.get("headers", {}), arguments.get("body", "").encode())
        response = exchange(request, ConnectionOptions(addresses, bounds, deadline, context), lambda _: 0)
        return Outcome(metadata={"status": response.head.status})

    return WorkerTool(WEBHOOK_SPEC, handler)
