"""Log lines of Celery and kombu about messages that they cannot use, without the bodies of these messages: one may be a tenant's call."""

import logging

_LOGGERS = ("celery.worker.consumer.consumer", "kombu.transport.redis")
_FUNCTIONS = frozenset({"on_unknown_message", "on_unknown_task", "on_invalid_task", "on_decode_error", "_do_restore_message"})
"""The hooks of Celery's consumer, and the function of kombu's channel, that log a whole message."""


class BodyFilter(logging.Filter):
    """Replaces the line of such a function by the function's name and the error."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.funcName in _FUNCTIONS:
            error = record.exc_info[1] if record.exc_info else None
            reason = f"{type(error).__name__}: {error}"[:200] if error is not None else "its body is not shown"
            record.msg, record.args, record.exc_info = "a message was refused by %s (%s)", (record.funcName, reason), None
        return True


def hide_bodies() -> None:
    """Install the filter for the whole process."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(BodyFilter())
