"""Clients of the HTTP API, which need only a URL and a key: nothing here connects to Redis or imports Celery."""
