"""What Celery's and kombu's own log lines do not tell here: the body of a message that they do not know what to do with. It may be a tenant's call."""

import logging

_SPEAKERS = ("celery.worker.consumer.consumer", "kombu.transport.redis")
_SHOWING = ("message body", "Could not restore message", "Received invalid task message", "Received unregistered task")


class WithoutBodies(logging.Filter):
    """Leaves of such a line what went wrong."""

    def filter(self, record: logging.LogRecord) -> bool:
        template = str(record.msg)
        if any(words in template for words in _SHOWING):
            error = record.exc_info[1] if record.exc_info else None
            told = f"{type(error).__name__}: {error}"[:200] if error is not None else "its body is not shown"
            record.msg, record.args, record.exc_info = "%s (%s)", (template.splitlines()[0].partition("%")[0].strip(), told), None
        return True


def hide_bodies() -> None:
    """For the whole process."""
    for name in _SPEAKERS:
        logging.getLogger(name).addFilter(WithoutBodies())
