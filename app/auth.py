"""Who may use the page: a password as a cookie, and requests that come from the page itself.

A server on the loopback address is still reachable by every web page the user has open, so requests must name this
host, and a WebSocket must come from a page of it. Knows nothing of streams.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

from streamvid.errors import StreamvidError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
COOKIE = "streamvid"


def check_host(host: str, password: str | None) -> None:
    """Raises StreamvidError for an address that others can reach without a password."""
    if host not in LOOPBACK and not password:
        raise StreamvidError(
            f"--host {host} lets other machines in, which needs a password; add --password, or leave --host out"
        )


class Gate:
    """Decides on requests by their headers.

    Args:
        password: None lets everybody in who reaches the server.
        local_only: the server listens on the loopback address, so requests must name it.
    """

    def __init__(self, password: str | None, *, local_only: bool) -> None:
        self._password, self._local_only = password, local_only
        self._key = secrets.token_urlsafe(24)

    def login(self, password: str) -> str | None:
        """The value of the cookie, or None when the password is wrong."""
        if self._password and hmac.compare_digest(password.encode(), self._password.encode()):
            return self._key
        return None

    def allows(self, cookies: Mapping[str, str]) -> bool:
        """Whether the cookie of a request lets it in."""
        return self._password is None or hmac.compare_digest(cookies.get(COOKIE, ""), self._key)

    def trusts(self, headers: Mapping[str, str]) -> bool:
        """Whether the request names this host, and, when it tells its origin, comes from a page of it."""
        host = headers.get("host", "")
        if self._local_only and urlsplit(f"//{host}").hostname not in LOOPBACK:
            return False
        origin = headers.get("origin")
        return origin is None or urlsplit(origin).netloc == host
