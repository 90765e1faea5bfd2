"""The worker side, which runs tools: Celery workers, and sandboxd. Only sandboxd opens the socket of the Docker
engine.
"""
