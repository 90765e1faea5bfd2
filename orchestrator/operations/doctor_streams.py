"""Checks of the stream gateways of all hosts: each is published and can be reached from here."""

from collections.abc import Sequence

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.hosts import HostReport
from toolcrew.contract.names import sandboxd_queue
from toolcrew.contract.signing import SigningKeys
from toolcrew.orchestrator.operations.findings import Report
from toolcrew.orchestrator.streams.connection import open_connection
from toolcrew.store.connection import RedisClient
from toolcrew.store.stream_gateways import StreamGatewayStore


async def examine_streams(
    client: RedisClient, deployment: str, keys: SigningKeys, hosts: Sequence[HostReport], report: Report
) -> None:
    """Connect to the stream gateway of each host with sandboxes, as the API does. Raises BrokerUnavailable."""
    gateways = StreamGatewayStore(client, deployment, keys)
    for host in (host for host in hosts if host.kind == "sandbox" and host.worker):
        gateway = await gateways.find(sandboxd_queue(host.queue))
        if gateway is None:
            report.add_warning(
                "streams",
                f"{host.host} has no stream gateway, so its sessions have no processes, files and ports over the API",
                "start python -m toolcrew.workers.stream_gateway on the host (docs/deploy.md)",
            )
            continue
        try:
            connection = await open_connection(keys, gateway)
        except SandboxUnavailable as error:
            report.add_failure("streams", f"{host.host}: {error}", "see the log of the stream gateway")
        else:
            connection.close()
            report.add_passed("streams", f"{host.host}: the gateway at {gateway.addresses[0]}:{gateway.port} answers")
