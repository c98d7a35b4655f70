"""Where Prometheus finds a worker's metrics: open to whoever can reach it, for they tell neither who asks
nor what.
"""

import socket
import ssl
import threading
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from security.tls_config import TlsConfig

# Of a client that is silent: it holds a thread.
_SILENCE_LIMIT_S = 10.0


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_LIMIT_S

    def log_message(self, format: str, *args: object) -> None:
        """A scrape is not worth a line."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away or speak no TLS are theirs to explain."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class MetricsServer:
    """Serves a registry over HTTP, or HTTPS where the worker has TLS, from threads of its own."""

    def __init__(self, host: str, port: int, tls: TlsConfig | None, registry: CollectorRegistry) -> None:
        """
        Args:
            port: 0: the system picks one.

        Raises:
            OSError: the port is taken.
        """
        kind = _Server6 if ":" in host else _Server
        self._server = kind((host, port), _Handler)
        self._server.set_app(make_wsgi_app(registry))
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls.cert, tls.key)
            # The handshake is its client's thread's business: a silent one holds nobody up.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.address = f"{host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
