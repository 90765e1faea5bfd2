"""The messages of a run: append-only, in the OpenAI wire shape, one JSON line each."""

import json
from collections.abc import Iterable, Iterator

from toolcrew.orchestrator.dialects.model import Message


class Transcript:
    """The messages of a run, in order. Messages are only added; a stored message never changes."""

    def __init__(self, *messages: Message) -> None:
        self._messages: list[Message] = []
        self._older: list[int] = []
        self._newest: list[int] = []
        for message in messages:
            if message.get("role") == "tool":
                self._older.append(len(self._messages))
            self.append(message)

    @property
    def older(self) -> list[int]:
        """Return the indexes of the observations (messages with results) of all steps except the last, including the
        tool messages of the history.
        """
        return list(self._older)

    @property
    def newest(self) -> list[int]:
        """Return the indexes of the observations of the last step."""
        return list(self._newest)

    def append(self, message: Message) -> None:
        """Add a deep copy of one message, so that later changes by the caller have no effect."""
        self._messages.append(json.loads(json.dumps(message)))

    def append_observations(self, messages: Iterable[Message]) -> None:
        """Add the observations (messages with results of calls) of one step."""
        self._older += self._newest
        first = len(self._messages)
        for message in messages:
            self.append(message)
        self._newest = list(range(first, len(self._messages)))

    def messages(self) -> list[Message]:
        """Return shallow copies of the messages for a request. Do not change nested values, which are shared."""
        return [dict(message) for message in self._messages]

    def to_json_lines(self) -> str:
        return "".join(json.dumps(message, ensure_ascii=False) + "\n" for message in self._messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages())

    def __len__(self) -> int:
        return len(self._messages)
