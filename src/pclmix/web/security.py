"""Who may talk to the server, and what a browser may do with its answers.

A page of another site can make a browser send requests here. It cannot read the answers, but a request alone could
draw or train; and by pointing a name of its own at 127.0.0.1 (DNS rebinding) it could read, too. So: Starlette's
TrustedHostMiddleware checks the Host, a request from another site is refused by Origin and Sec-Fetch-Site, and
everything that changes something carries a header that no form can send. On an address others can reach, every
request needs the token. MONAI Label's clients cannot send that header: for them a POST that changes something must
have a content type that no form has, and PUT and DELETE are no form's methods.
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

LOCAL = ("127.0.0.1", "localhost", "::1")  #: addresses that only this computer can reach
COOKIE, HEADER = "pclmix_token", "x-pclmix"
_SAFE = ("GET", "HEAD")
UPLOAD = "/api/import"  #: the one path whose body may be large: it is counted there while it streams
_BODY = 64 << 20
#: First parts of MONAI Label's addresses, which its clients call without our header.
CLIENT = ("info", "datastore", "infer", "train", "activelearning", "auth", "session")
_OPEN = ("/auth/", "/auth/token")  # where a client asks whether it needs a token, and gets it for the right password
_HARMLESS = ("/infer/", "/auth/token")  # called with a form's content type; they change nothing
_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")
#: The viewer compiles no code and loads nothing from elsewhere; its font is a data: address, its workers are blobs.
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
    """An address as a URL and the Host header write it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def new_token() -> str:
    return secrets.token_urlsafe(24)


@dataclass(frozen=True)
class Rules:
    """`token` is None on this computer's own address. `hosts` are the names a request may address, `*` is any."""

    token: str | None = None
    monailabel: bool = False  #: whether MONAI Label's addresses are served
    hosts: tuple[str, ...] = tuple(map(bracketed, LOCAL))

    @classmethod
    def of(cls, host: str, *, monailabel: bool = False) -> Rules:
        """The rules for an address to listen on: any but this computer's own needs a token."""
        if is_local(host):
            return cls(monailabel=monailabel)
        everywhere = host in ("0.0.0.0", "::", "")
        return cls(new_token(), monailabel, ("*",) if everywhere else tuple(map(bracketed, (host, *LOCAL))))


class Guard:
    """ASGI middleware that lets a request through only if the rules allow it, and protects every answer.

    The Host is not looked at here: TrustedHostMiddleware does that.
    """

    def __init__(self, app: App, rules: Rules, largest: int = _BODY) -> None:
        self.app, self.rules, self.largest = app, rules, largest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no websockets here
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
        if foreign:  # a client that cannot send our header: what it can, and a form cannot, is another content type
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
        """The address printed at start has the token in it: it becomes a cookie and leaves the address bar."""
        query = parse_qsl(scope["query_string"].decode("latin-1"))
        given = [value for key, value in query if key == "token"]
        if scope["method"] == "GET" and scope["path"] == "/" and given and self._is_token(given[0]):
            rest = urlencode([(key, value) for key, value in query if key != "token"])
            cookie = f"{COOKIE}={self.rules.token}; Path=/; HttpOnly; SameSite=Strict"
            # Not a redirect: a strict cookie is not sent along one that began on another site.
            page = f'<!doctype html><meta http-equiv="refresh" content="0;url=/{"?" + rest if rest else ""}">'
            headers = [(b"set-cookie", cookie.encode()), (b"content-type", b"text/html; charset=utf-8")]
            await _answer(send, 200, page, headers)
            return
        await _answer(send, 401, "open the address that `pclmix serve` printed: it carries the token")


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
