"""Everything of a worker that touches the insides of Celery and kombu."""
