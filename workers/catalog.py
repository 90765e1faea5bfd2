"""Publishes what this side can run, again and again, so that it vanishes with the last worker."""

import threading

import redis
import structlog

from contract.names import catalog_key
from contract.specs import Catalog

log = structlog.get_logger(__name__)

CATALOG_TTL_S = 15
REFRESH_S = 4.0


class CatalogPublisher:
    """A thread that keeps the catalog alive in Redis while the worker lives."""

    def __init__(self, client: "redis.Redis", deployment: str, catalog: Catalog) -> None:
        self._client = client
        self._key = catalog_key(deployment)
        self._text = catalog.model_dump_json()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="catalog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop refreshing; the entry expires by itself, since other workers may publish the same."""
        self._stop.set()
        self._thread.join(timeout=REFRESH_S)

    def _run(self) -> None:
        while True:
            try:
                self._client.set(self._key, self._text, ex=CATALOG_TTL_S)
            except redis.RedisError as error:
                log.warning("catalog_not_published", error=str(error))
            if self._stop.wait(REFRESH_S):
                return
