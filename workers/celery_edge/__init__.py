"""The parts of a worker that depend on the internals of Celery and kombu."""
