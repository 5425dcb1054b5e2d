"""Access control, and security headers of every response.

A page of another site can make a browser send requests here (CSRF). It cannot read the responses, but a request alone
could draw or train; with DNS rebinding it could also read. Therefore: Starlette's TrustedHostMiddleware checks the
Host header, requests from other sites are refused by Origin and Sec-Fetch-Site, and every request that changes state
needs a header that HTML forms cannot send. On an address that others can reach, every request needs the token. Clients
of MONAI Label cannot send the header: for them a POST that changes state must have a content type that forms cannot
send, and forms cannot send PUT and DELETE.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL = ("127.0.0.1", "localhost", "::1")  #: addresses reachable from this computer only
COOKIE, HEADER = "pclmix_token", "x-pclmix"
_SAFE = ("GET", "HEAD")
UPLOAD = "/api/import"  #: the only path with a large body, which is counted while it streams
_BODY = 64 << 20
#: First path components of MONAI Label's interface, whose clients do not send HEADER.
CLIENT = ("info", "datastore", "infer", "train", "activelearning", "auth", "session")
_OPEN = ("/auth/", "/auth/token")  # no token needed: whether a token is required, and login
_HARMLESS = ("/infer/", "/auth/token")  # forms may send these; they change nothing
_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")
#: The viewer needs no eval and no external resources; its font is a data: URL, its workers are blobs.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self' data: blob:; worker-src 'self' blob:; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def is_local(host: str) -> bool:
    return host in LOCAL


def bracketed(host: str) -> str:
    """An address as in URLs and the Host header: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def new_token() -> str:
    return secrets.token_urlsafe(24)


@dataclass(frozen=True)
class Rules:
    """Access rules: `token` is None on loopback; `hosts` are the accepted Host names, `*` accepts any."""

    token: str | None = None
    monailabel: bool = False  #: whether MONAI Label's interface is served
    hosts: tuple[str, ...] = tuple(map(bracketed, LOCAL))

    @classmethod
    def of(cls, host: str, *, monailabel: bool = False) -> Rules:
        """The rules for a listening address: any other than loopback needs a token."""
        if is_local(host):
            return cls(monailabel=monailabel)
        everywhere = host in ("0.0.0.0", "::", "")
        return cls(new_token(), monailabel, ("*",) if everywhere else tuple(map(bracketed, (host, *LOCAL))))


class Guard:
    """ASGI middleware that enforces the rules and adds security headers to every response.

    The Host header is checked by TrustedHostMiddleware.
    """

    def __init__(self, app: App, rules: Rules, largest: int = _BODY) -> None:
        self.app, self.rules, self.largest = app, rules, largest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no websockets
        send = _with_headers(send, scope["path"])
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        method, path = scope["method"], scope["path"]
        foreign = self.rules.monailabel and path.lstrip("/").partition("/")[0] in CLIENT
        if method not in _SAFE and path != UPLOAD:
            most = self.largest if foreign and path.startswith("/datastore") else _BODY
            length = headers.get("content-length", "0" if method == "DELETE" else "")
            if not length.isdecimal() or int(length) > most or "transfer-encoding" in headers:
                await _answer(send, 413, f"a request needs a content-length of at most {most >> 20} MiB")
                return
        reason = self._refusal(method, path, headers, foreign)
        if reason:
            await _answer(send, 403, reason)
        elif self.rules.token is not None and not (foreign and path in _OPEN) and not self._has_token(headers):
            await self._ask_for_token(scope, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, method: str, path: str, headers: dict[str, str], foreign: bool) -> str:
        site = headers.get("sec-fetch-site", "none")
        navigation = method == "GET" and headers.get("sec-fetch-mode") == "navigate" and not path.startswith("/api")
        if site not in ("same-origin", "none") and not navigation:
            return "requests from other sites are refused"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != headers.get("host", ""):
            return "requests from other sites are refused"
        if foreign:  # cannot send HEADER, but a content type that forms cannot send
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            form = method == "POST" and (not kind or kind in _FORMS)
            return "send this as application/json" if form and not path.startswith(_HARMLESS) else ""
        if method not in _SAFE and headers.get(HEADER) != "1":
            return f"a request that changes something needs the header {HEADER}: 1"
        return ""

    def _has_token(self, headers: dict[str, str]) -> bool:
        given = [headers.get("authorization", "").removeprefix("Bearer ")]
        cookies = SimpleCookie()
        try:
            cookies.load(headers.get("cookie", ""))
        except CookieError:
            cookies.clear()
        if COOKIE in cookies:
            given.append(cookies[COOKIE].value)
        return any(self._is_token(value) for value in given)

    def _is_token(self, value: str) -> bool:
        assert self.rules.token is not None
        return secrets.compare_digest(value.encode(), self.rules.token.encode())

    async def _ask_for_token(self, scope: Scope, send: Send) -> None:
        """Exchange the token in the printed URL for a cookie and remove it from the address bar."""
        query = parse_qsl(scope["query_string"].decode("latin-1"))
        given = [value for key, value in query if key == "token"]
        if scope["method"] == "GET" and scope["path"] == "/" and given and self._is_token(given[0]):
            rest = urlencode([(key, value) for key, value in query if key != "token"])
            cookie = f"{COOKIE}={self.rules.token}; Path=/; HttpOnly; SameSite=Strict"
            # Not a redirect: browsers omit strict cookies when a redirect started on another site.
            page = f'<!doctype html><meta http-equiv="refresh" content="0;url=/{"?" + rest if rest else ""}">'
            headers = [(b"set-cookie", cookie.encode()), (b"content-type", b"text/html; charset=utf-8")]
            await _answer(send, 200, page, headers)
            return
        await _answer(send, 401, "open the URL printed by `pclmix serve`: it contains the token")


def _with_headers(send: Send, path: str) -> Send:
    async def wrapped(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            present = {key.lower() for key, _ in message["headers"]}
            extra = dict(_HEADERS)
            extra["cache-control"] = "no-store" if path.startswith("/api") else "no-cache"
            more = [(k.encode(), v.encode()) for k, v in extra.items() if k.encode() not in present]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return wrapped


async def _answer(send: Send, status: int, text: str, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    body = text.encode()
    given = headers or [(b"content-type", b"text/plain; charset=utf-8")]
    length = [(b"content-length", str(len(body)).encode()), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": [*given, *length]})
    await send({"type": "http.response.body", "body": body})
