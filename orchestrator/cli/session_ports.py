"""`toolcrew sessions forward`: a port of a session at a local address."""

import asyncio
from contextlib import suppress
from typing import Annotated

import typer

from toolcrew.concurrency.tasks import cancel_all
from toolcrew.contract.errors import ApiUnavailable, ConfigError, ToolcrewError
from toolcrew.orchestrator.cli.runner import run_work
from toolcrew.orchestrator.sdk.http.async_client import AsyncClient
from toolcrew.orchestrator.sdk.http.async_ports import AsyncPortConnection, AsyncPorts
from toolcrew.orchestrator.terminal.output import escape_controls

_READ_BYTES = 32 * 1024


def sessions_forward(
    session_id: Annotated[str, typer.Argument(help="The id of the session.")],
    port: Annotated[int, typer.Argument(min=1, max=65535, help="The port that a program of the session listens on.")],
    local: Annotated[
        str | None, typer.Option("--local", help="ADDRESS:PORT to listen on. Default: 127.0.0.1 with the same port.")
    ] = None,
) -> None:
    """Forward a local port to a session over TOOLCREW_URL, until Ctrl-C."""
    host, own_port = _parse_address(local, port)

    async def work() -> None:
        async with AsyncClient() as client:
            session = client.sessions.get(session_id)
            # A session that is closed, or has no streams, is reported now and not for each connection.
            await session.processes.list()
            forwarder = _Forwarder(session.ports, port)
            async with await _listen(forwarder, host, own_port) as server:
                address = server.sockets[0].getsockname()
                typer.echo(
                    f"http://{_format_address(address[0], address[1])} is port {port} of the session; Ctrl-C ends it"
                )
                await server.serve_forever()

    run_work(work(), False)


def _parse_address(local: str | None, port: int) -> tuple[str, int]:
    host, colon, number = (local if local is not None else f"127.0.0.1:{port}").rpartition(":")
    if not colon or not number.isascii() or not number.isdigit() or int(number) > 65535:
        raise typer.BadParameter(f"{local} is no address: write it as 127.0.0.1:8000")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(number)


def _format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _listen(forwarder: "_Forwarder", host: str, port: int) -> asyncio.Server:
    try:
        return await asyncio.start_server(forwarder.serve, host, port)
    except OSError as error:
        raise ConfigError(
            f"{_format_address(host, port)} cannot be used ({error.strerror}): choose another with --local ADDRESS:PORT"
        ) from error


class _Forwarder:
    """Connects each local connection to the program of the session."""

    def __init__(self, ports: AsyncPorts, port: int) -> None:
        self._ports = ports
        self._port = port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one local connection until both directions have ended."""
        try:
            async with await self._ports.connect(self._port) as connection:
                await _relay(connection, reader, writer)
        except ToolcrewError as error:
            # The other connections go on.
            typer.echo(f"toolcrew: {escape_controls(str(error))}", err=True)
            writer.transport.abort()
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def _relay(connection: AsyncPortConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    directions = [asyncio.ensure_future(_send(connection, reader)), asyncio.ensure_future(_receive(connection, writer))]
    try:
        done, _ = await asyncio.wait(directions, return_when=asyncio.FIRST_EXCEPTION)
        for direction in done:
            direction.result()
    except ConnectionError:
        # The local program has left.
        writer.transport.abort()
    finally:
        await cancel_all(directions)


async def _send(connection: AsyncPortConnection, reader: asyncio.StreamReader) -> None:
    try:
        while data := await reader.read(_READ_BYTES):
            await connection.write(data)
        await connection.close_input()
    except ApiUnavailable:
        # A program that closes its connection ends it for both directions; `read` reports a lost connection.
        return


async def _receive(connection: AsyncPortConnection, writer: asyncio.StreamWriter) -> None:
    while data := await connection.read():
        writer.write(data)
        await writer.drain()
    writer.write_eof()
