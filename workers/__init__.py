"""The side that runs tools: Celery workers, and sandboxd, the one holder of the engine socket."""
