"""Clients that read more slowly than their model writes: each slows its own stream, and nothing else."""

import asyncio
import gc
import json
import socket
from contextlib import ExitStack

from serve_app.gateway.upstream import HIGH_WATER, Connection
from serve_app.model.http_server import HttpServer
from tests.inprocess import HOST, Yard, model, yard

CLIENTS = 200
# Every event names the model, so a long name makes big events: 16 MB are offered to each client in 2,000 of them.
MODEL = "m" * 8000
EVENTS = 2000
# What asyncio reads of a socket at once, and what uvicorn keeps before it makes the relay wait.
ONE_READ = 256 * 1024
UVICORN_HIGH_WATER = 64 * 1024
# Of one stream: what was read of the replica but not relayed, and what was relayed last but not sent.
BOUND = 2 * (HIGH_WATER + ONE_READ) + UVICORN_HIGH_WATER


class Held:
    """How many bytes the gateway keeps, in all and at most for one client. The kernel's own buffers do not count."""

    def __init__(self, server: HttpServer) -> None:
        unread = [connection._buffered for connection in gc.get_objects() if type(connection) is Connection]
        unsent = [c.transport.get_write_buffer_size() for c in server._server.server_state.connections]
        self.all = sum(unread) + sum(unsent)
        self.most = max(unread, default=0) + max(unsent, default=0)


def slow_client(port: int) -> socket.socket:
    """Has asked for a stream and read nothing yet."""
    body = json.dumps({"model": MODEL, "messages": [], "stream": True, "max_tokens": EVENTS}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((HOST, port))
    client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    client.setblocking(False)
    return client


def small_socket_buffers(server: HttpServer) -> None:
    """The kernel takes megabytes on loopback, and would hide what the gateway itself keeps."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        server._socket.setsockopt(socket.SOL_SOCKET, option, 16 * 1024)


def running(at: Yard) -> int:
    return int(at.models[MODEL].replicas[0].engine.report()["running"])


async def test_slow_clients_cost_their_own_streams_alone() -> None:
    """200 clients at one byte per second: what is kept for each stays under the bound although more is offered, their
    engine requests wait, another client is served, and nothing is left when they leave."""
    fake = model(MODEL, slots=CLIENTS + 8)
    small_socket_buffers(fake.replicas[0].server)
    async with yard(fake) as y:
        # A second server for the same gateway: this one's sockets are the test's own.
        server = HttpServer(y.app, HOST)
        small_socket_buffers(server)
        await server.start()
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            clients = [stack.enter_context(slow_client(server.port)) for _ in range(CLIENTS)]
            async with asyncio.timeout(60):
                for client in clients:
                    await loop.sock_recv(client, 1)
            for _ in range(2):
                for _ in range(5):
                    await asyncio.sleep(0.2)
                    assert Held(server).most <= BOUND
                for client in clients:
                    await loop.sock_recv(client, 1)
            assert running(y) == CLIENTS
            body = {"model": MODEL, "messages": [], "max_tokens": 1}
            assert (await y.client.post("/v1/chat/completions", json=body)).status_code == 200
        await y.quiet()
        assert Held(server).all == 0
        await server.stop()
