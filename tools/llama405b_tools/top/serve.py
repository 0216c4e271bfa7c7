"""Serve cluster-top's screen to browsers with textual-serve; each browser gets its own cluster-top process.

The URL contains a secret token, and requests without it get nothing. There is no encryption: from another machine, use an SSH tunnel.
"""

import secrets
import shlex
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web
from textual_serve.server import Server

from llama405b.contract.errors import UserError, reason_of
from llama405b.contract.software import module_argv

MAX_BROWSERS = 8  # at a time: each has its own connections to the hosts
TOKEN_BYTES = 16


class TopServer(Server):
    """textual-serve's server below a secret path, reachable under any host name."""

    def __init__(self, command: str, address: str, port: int, show: Callable[[str], object]) -> None:
        super().__init__(command, address, port, "cluster-top", templates_path=str(Path(__file__).parent / "page"))
        self.token = secrets.token_urlsafe(TOKEN_BYTES)
        self.show = show
        self.n_browsers = 0

    @property
    def url(self) -> str:
        """The URL of the screen."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/{self.token}/"

    async def _make_app(self) -> web.Application:
        app = web.Application()
        app.add_subapp(f"/{self.token}", await super()._make_app())
        return app

    async def on_startup(self, app: web.Application) -> None:  # noqa: ARG002
        """Print the URL of the screen."""
        self.show(f"open {self.url} in a browser; Ctrl-C stops the server")

    async def handle_index(self, request: web.Request) -> web.StreamResponse:
        """Return the page, using the address by which the browser reached this server, such as a tunnel's."""
        self.public_url = f"{request.scheme}://{request.host}"
        page: web.StreamResponse = await super().handle_index(request)
        return page

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Run a cluster-top for a browser; refuse pages of other sites and too many browsers."""
        if urlsplit(request.headers.get("Origin", f"//{request.host}")).netloc != request.host:
            raise web.HTTPForbidden(text="request from another site's page")
        if self.n_browsers >= MAX_BROWSERS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_BROWSERS} browsers are connected already")
        self.n_browsers += 1
        try:
            return await super().handle_websocket(request)
        finally:
            self.n_browsers -= 1

    def initialize_logging(self) -> None:
        """Log nothing: logged URLs would contain the token."""


def serve(address: str, port: int, words: Sequence[str], show: Callable[[str], object]) -> None:
    """Serve ``cluster-top WORDS`` until Ctrl-C.

    Raises:
        UserError: The address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        # bind once to report an unusable address before the server starts
        with socket.create_server((address, port), family=family):
            pass
    except OSError as error:
        raise UserError(
            f"--serve: {address}:{port} cannot be listened on ({reason_of(error)}); use another port"
        ) from None
    command = shlex.join([*module_argv("llama405b_tools.cli"), "top", *words])
    TopServer(f"exec {command}", address, port, show).serve()
