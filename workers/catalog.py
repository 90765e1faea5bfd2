"""Publishes what the pools of this worker can run, again and again, so that it vanishes with the last worker of a pool."""

import json
import threading
from collections.abc import Mapping

import redis
import structlog

from contract.names import catalog_key, catalog_names_key
from contract.signing import SigningKeys
from contract.specs import Catalog, seal_catalog

log = structlog.get_logger(__name__)

CATALOG_TTL_S = 15
NAMES_TTL_S = 7 * 24 * 3600
REFRESH_S = 4.0


class CatalogPublisher:
    """A thread that keeps the catalogs alive in Redis while the worker lives. `catalogs`: pool -> what it serves here."""

    def __init__(self, client: "redis.Redis", deployment: str, keys: SigningKeys, catalogs: Mapping[str, Catalog]) -> None:
        self._client, self._keys = client, keys
        self._deployment = deployment
        self._entries = self._build_entries(catalogs)
        self._is_stopped = False
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="catalog", daemon=True)

    def replace(self, catalogs: Mapping[str, Catalog]) -> None:
        """Publish these from now on, the first time at once. What is not among them any more expires."""
        self._entries = self._build_entries(catalogs)
        self._changed.set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop refreshing; the entries expire by themselves, since other workers may publish the same."""
        self._is_stopped = True
        self._changed.set()
        self._thread.join(timeout=REFRESH_S)

    def _run(self) -> None:
        while not self._is_stopped:
            self._changed.clear()
            try:
                self._publish()
            except redis.RedisError as error:
                log.warning("catalog_not_published", error=str(error))
            # What comes between is not missed: the event is cleared before the entries are read.
            if not self._is_stopped:
                self._changed.wait(REFRESH_S)

    def _publish(self) -> None:
        with self._client.pipeline(transaction=False) as pipe:
            for key, text, ttl_s in self._entries:
                pipe.set(key, text, ex=ttl_s)
            pipe.execute()

    def _build_entries(self, catalogs: Mapping[str, Catalog]) -> list[tuple[str, str, int]]:
        """Key, text and seconds of each."""
        entries: list[tuple[str, str, int]] = []
        for pool, catalog in catalogs.items():
            # What explains a missing tool, to every tenant: not those of some only.
            names = json.dumps([spec.name for spec in catalog.tools if spec.tenants is None])
            entries.append((catalog_key(self._deployment, pool), seal_catalog(self._keys, pool, catalog), CATALOG_TTL_S))
            entries.append((catalog_names_key(self._deployment, pool), names, NAMES_TTL_S))
        return entries
