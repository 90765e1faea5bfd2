"""Counters of the server: requests, complete replies by conversation and step, faults, and repeated requests."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.model_server.chat_request import ChatRequest


@dataclass
class _Conversation:
    requests: int = 0
    attempts: Counter[int] = field(default_factory=Counter)
    replies: Counter[int] = field(default_factory=Counter)


class Counters:
    """Counts since the start, or since the last reset."""

    def __init__(self) -> None:
        self.open = 0
        self.reset()

    def reset(self) -> None:
        self.requests = self.probes = self.refused = self.replies = self.left = self.identical = 0
        self.most_open = self.open
        self.faults: Counter[str] = Counter()
        self._seen: set[bytes] = set()
        self._conversations: dict[str, _Conversation] = {}

    def opened(self) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)

    def closed(self) -> None:
        self.open -= 1

    def ask(self, chat: ChatRequest) -> int:
        """Count a request and return the number of requests for this step of its conversation."""
        self.requests += 1
        if chat.digest in self._seen:
            self.identical += 1
        self._seen.add(chat.digest)
        conversation = self._conversations.setdefault(chat.conversation, _Conversation())
        conversation.requests += 1
        conversation.attempts[chat.step] += 1
        return conversation.attempts[chat.step]

    def reply(self, conversation: str, step: int) -> None:
        """Count a complete reply that was sent to the client."""
        self.replies += 1
        # A reset happened during the reply, so the reply belongs to the old counters.
        if conversation in self._conversations:
            self._conversations[conversation].replies[step] += 1

    def tell(self) -> dict[str, Any]:
        """Return the content of /stats. `repeated`: steps with more than one complete reply."""
        repeated: list[dict[str, Any]] = [
            {"conversation": name, "step": step, "replies": count}
            for name, conversation in self._conversations.items()
            for step, count in sorted(conversation.replies.items())
            if count > 1
        ]
        return {
            "requests": self.requests,
            "replies": self.replies,
            "repeated": repeated,
            "replies_repeated": sum(entry["replies"] - 1 for entry in repeated),
            "identical_requests": self.identical,
            "faults": dict(sorted(self.faults.items())),
            "refused": self.refused,
            "left": self.left,
            "probes": self.probes,
            "open": self.open,
            "most_open": self.most_open,
            "conversations": {
                name: {
                    "requests": conversation.requests,
                    "replies": {str(step): n for step, n in sorted(conversation.replies.items())},
                }
                for name, conversation in self._conversations.items()
            },
        }
