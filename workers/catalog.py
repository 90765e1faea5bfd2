"""Keeps what the pools of this worker can run published, so that it expires with the last worker of a pool."""

import threading
from collections.abc import Mapping

import structlog

from contract.errors import BrokerUnavailable
from contract.signing import SigningKeys
from contract.specs import Catalog
from store.catalog import WorkerCatalogStore
from store.connection import SyncRedis

log = structlog.get_logger(__name__)

REFRESH_S = 4.0


class CatalogPublisher:
    """A thread that keeps the catalogs alive in Redis while the worker lives. `catalogs`: pool -> what it serves here."""

    def __init__(self, client: SyncRedis, deployment: str, keys: SigningKeys, catalogs: Mapping[str, Catalog]) -> None:
        self._store = WorkerCatalogStore(client, deployment, keys)
        self._catalogs = catalogs
        self._is_stopped = False
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="catalog", daemon=True)

    def replace(self, catalogs: Mapping[str, Catalog]) -> None:
        """Publish these from now on, the first time at once. What is not among them any more expires."""
        self._catalogs = catalogs
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
                self._store.publish(self._catalogs)
            except BrokerUnavailable as error:
                log.warning("catalog_not_published", error=str(error))
            # What comes between is not missed: the event is cleared before the catalogs are read.
            if not self._is_stopped:
                self._changed.wait(REFRESH_S)
