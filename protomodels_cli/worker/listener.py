"""A peer's own port, where neighbours come in, with the certificate that it has at the time."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import grpc

from protomodels_cli.protocol.messages import BadMessage
from protomodels_cli.wire.cap import Cap
from protomodels_cli.wire.channels import SERVER_OPTIONS
from protomodels_cli.wire.join_link import address
from protomodels_cli.wire.path import checked_path
from protomodels_cli.wire.tls import Identity, peer_name
from protomodels_cli.worker.links import METHOD, Link
from protomodels_cli.worker.problems import PortNotOpened
from protomodels_cli.worker.telling import PeerError

MOST_INCOMING = 128  # connections: two are needed, and strangers get no further than a handshake of ten seconds


def _configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    own = identity.key_pem, identity.certificate_pem
    return grpc.ssl_server_certificate_configuration([own], identity.authority_pem)


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")


class Listener:
    """This peer's own port: neighbours that dial are matched with the links that wait for them."""

    def __init__(self, identity: Identity):
        self._links: dict[tuple[int, int], Link] = {}
        self._next = self._in_use = identity
        self._credentials = grpc.dynamic_ssl_server_credentials(
            _configuration(identity), self._newer, require_client_authentication=True
        )
        options = [*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", MOST_INCOMING)]
        self._server = grpc.aio.server(options=options)
        handlers = {METHOD.name: grpc.stream_stream_rpc_method_handler(self._link)}
        self._server.add_registered_method_handlers(METHOD.containing_service.full_name, handlers)
        self.port = self.inner_port = 0  # that neighbours dial, and gRPC's own: another one under a cap

    def use(self, identity: Identity) -> None:
        """Show this one to whoever connects from now on."""
        self._next = identity

    def _newer(self) -> grpc.ServerCertificateConfiguration | None:
        """gRPC asks at every handshake, from a thread of its own. None: nothing has changed."""
        if self._next is self._in_use:
            return None
        self._in_use = self._next
        return _configuration(self._in_use)

    async def start(self, host: str, port: int, cap: Cap | None = None) -> None:
        try:
            inner = (host, port) if cap is None else ("127.0.0.1", 0)
            self.port = self.inner_port = self._server.add_secure_port(address(*inner), self._credentials)
            if cap is not None:
                listening = _listening(host, port)
                self.port = listening.getsockname()[1]
                cap.let_in(listening, ("127.0.0.1", self.inner_port))
        except (RuntimeError, OSError):
            raise PeerError(PortNotOpened(port)) from None
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(grace=None)

    def expect(self, link: Link) -> None:
        self._links[link.generation, link.boundary] = link

    def forget(self) -> None:
        self._links.clear()

    async def _link(self, request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        metadata = dict(context.invocation_metadata() or ())
        try:
            key = int(metadata["generation"]), int(metadata["boundary"])
        except (KeyError, ValueError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "generation and boundary must be given")
        link = self._links.get(key)
        caller = [name.decode() for name in context.auth_context().get("x509_subject_alternative_name", [])]
        if link is None or peer_name(link.neighbour) not in caller:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "no link is expected from this peer")
            return
        await context.send_initial_metadata(())
        try:
            await link.run(context, path=checked_path(str(metadata.get("path", ""))))
        except BadMessage as e:  # which the link keeps: the generation reports it
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))
        except ConnectionError as e:  # it is silent: gRPC would show a traceback for what is no bug
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(e))
