"""Publishes what the pools of this worker can run, again and again, so that it vanishes with the last worker of a pool."""

import json
import threading
from collections.abc import Mapping

import redis
import structlog

from contract.names import catalog_key, catalog_names_key
from contract.specs import Catalog

log = structlog.get_logger(__name__)

CATALOG_TTL_S = 15
NAMES_TTL_S = 7 * 24 * 3600
REFRESH_S = 4.0


class CatalogPublisher:
    """A thread that keeps the catalogs alive in Redis while the worker lives. `catalogs`: pool -> what it serves here."""

    def __init__(self, client: "redis.Redis", deployment: str, catalogs: Mapping[str, Catalog]) -> None:
        self._client = client
        self._entries: list[tuple[str, str, int]] = []
        for pool, catalog in catalogs.items():
            # What explains a missing tool, to every tenant: not those of some only.
            names = json.dumps([spec.name for spec in catalog.tools if spec.tenants is None])
            self._entries.append((catalog_key(deployment, pool), catalog.model_dump_json(), CATALOG_TTL_S))
            self._entries.append((catalog_names_key(deployment, pool), names, NAMES_TTL_S))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="catalog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop refreshing; the entries expire by themselves, since other workers may publish the same."""
        self._stop.set()
        self._thread.join(timeout=REFRESH_S)

    def _run(self) -> None:
        while True:
            try:
                self._publish()
            except redis.RedisError as error:
                log.warning("catalog_not_published", error=str(error))
            if self._stop.wait(REFRESH_S):
                return

    def _publish(self) -> None:
        with self._client.pipeline(transaction=False) as pipe:
            for key, text, ttl_s in self._entries:
                pipe.set(key, text, ex=ttl_s)
            pipe.execute()
