"""The run's messages: append-only, in the OpenAI wire shape; one JSON line each."""

import copy
import json
from collections.abc import Iterator

from orchestrator.models.base import Message


class Transcript:
    """Messages in order. What is in stays as it is."""

    def __init__(self, *messages: Message) -> None:
        self._messages: list[Message] = []
        for message in messages:
            self.append(message)

    def append(self, message: Message) -> None:
        """Add one message; a later change of the caller's dict does not reach it."""
        self._messages.append(json.loads(json.dumps(message)))

    def messages(self) -> list[Message]:
        """Copies of them, for a request."""
        return copy.deepcopy(self._messages)

    def to_json_lines(self) -> str:
        return "".join(json.dumps(message, ensure_ascii=False) + "\n" for message in self._messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages())

    def __len__(self) -> int:
        return len(self._messages)
