"""Whether a peer can be dialled where it says: the coordinator tries. Knows TLS and nothing of the run."""

from __future__ import annotations

import asyncio
import ssl

from cryptography import x509

from protomodels_cli import timeouts
from protomodels_cli.quantities import duration
from protomodels_cli.wire.join_link import address
from protomodels_cli.wire.tls import peer_name


async def dial_back(context: ssl.SSLContext, peer: str, host: str, port: int) -> str:
    """Do a TLS handshake with whoever answers there. Empty: it is that peer; otherwise the reason."""
    if not 1 <= port <= 65535 or not host:
        return "the coordinator does not know the peer's address or port"
    where = address(host, port)
    try:
        async with asyncio.timeout(timeouts.DIAL_BACK):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except TimeoutError:
        return f"no answer from {where} within {duration(timeouts.DIAL_BACK)}"
    except (OSError, ssl.SSLError) as e:
        return f"cannot reach {where}: {getattr(e, 'strerror', None) or e}"
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        names = x509.load_der_x509_certificate(der).extensions.get_extension_for_class(x509.SubjectAlternativeName)
        right = peer_name(peer) in names.value.get_values_for_type(x509.DNSName)
        return "" if right else f"another peer answers at {where}"
    finally:
        writer.transport.abort()
