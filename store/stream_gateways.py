"""Records of stream gateways in Redis: one key for each sandboxd. A record expires unless its gateway renews it."""

from toolcrew.contract.errors import EnvelopeRefused
from toolcrew.contract.names import stream_gateway_key
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.stream_gateways import GATEWAY_TTL_S, StreamGateway, open_gateway, seal_gateway
from toolcrew.store.connection import RedisClient, broker_errors
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)


class StreamGatewayStore:
    """The records of stream gateways. Every method raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: RedisClient, deployment: str, keys: SigningKeys) -> None:
        self._client = client
        self._deployment = deployment
        self._keys = keys

    async def publish(self, gateway: StreamGateway) -> None:
        """Write the record of a gateway. The last gateway that starts at a sandboxd replaces an earlier one."""
        key = stream_gateway_key(self._deployment, gateway.queue)
        with broker_errors("the record of the stream gateway was not written"):
            await self._client.set(key, seal_gateway(self._keys, gateway), ex=GATEWAY_TTL_S)

    async def withdraw(self, gateway: StreamGateway) -> None:
        """Remove the record of a gateway that ends, unless another gateway has replaced it."""
        if await self.find(gateway.queue) == gateway:
            with broker_errors("the record of the stream gateway was not removed"):
                await self._client.delete(stream_gateway_key(self._deployment, gateway.queue))

    async def find(self, queue: str) -> StreamGateway | None:
        """Return the gateway of a sandboxd; None when none has published a valid record. `queue`: of
        `sandboxd_queue`.
        """
        with broker_errors("the record of the stream gateway was not read"):
            sealed = await self._client.get(stream_gateway_key(self._deployment, queue))
        if sealed is None:
            return None
        try:
            return open_gateway(self._keys, queue, sealed)
        except EnvelopeRefused as error:
            log.warning("stream_gateway_refused", queue=queue, reason=str(error))
            return None
