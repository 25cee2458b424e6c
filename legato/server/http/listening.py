"""The port: taken before anything loads, with a clear word where that cannot be.

Owns the listening socket and the check of the certificate. Imports no HTTP library, so that it is quick. Called by `legato serve`
before the model loads; `server.run` serves on the socket.
"""

from __future__ import annotations

import errno
import socket
import ssl
from pathlib import Path

from legato.server.settings import Listen, SettingsError

BACKLOG = 2048


def listen(where: Listen) -> socket.socket:
    """A socket that listens: from here on the port is taken, though nothing answers yet.

    Raises:
        SettingsError: the address does not exist, the port is taken, or it needs more rights.
    """
    try:
        found = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"host: {where.host!r} is no address of this machine ({error})") from error
    family, kind, protocol_number, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    sock = socket.socket(family, kind, protocol_number)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise SettingsError(_why_not(where, error)) from error
    sock.setblocking(False)
    return sock


def _why_not(where: Listen, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port: {where.port} on {where.host} is in use; stop what listens there, or choose another (0: any free one)"
    if error.errno == errno.EACCES:
        return f"port: {where.port} needs more rights than this user has; choose one from 1024 up"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host: {where.host} is no address of this machine"
    return f"port: cannot listen on {where.host} port {where.port}: {error.strerror}"


def check_tls(where: Listen) -> None:
    """Refuses a certificate that cannot be used, before anything loads. Raises `SettingsError`."""
    if where.certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(where.certfile, where.keyfile)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"certfile: {Path(where.certfile).name} and its key cannot be used ({error}); both must be PEM, without password"
        ) from error


def address_of(where: Listen, sock: socket.socket) -> str:
    """The URL to reach it by; a wildcard address is shown as this machine's own."""
    host = where.host if where.host not in ("", "0.0.0.0", "::") else "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if where.certfile else 'http'}://{host}:{sock.getsockname()[1]}"
