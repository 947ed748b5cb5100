"""Which URLs and addresses images may be fetched from: https to allowed host names with public addresses."""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Collection
from dataclasses import dataclass

MAX_URL_LENGTH = 2048
HTTPS_PORT = 443
# IPv6 networks whose packets leave for an IPv4 address inside the address: NAT64, its local form, 6to4, Teredo.
TRANSLATED = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")))
# `is_global` of Python, but the metadata service of a cloud (192.0.0.192).
PROTOCOL_ASSIGNMENTS = ipaddress.ip_network("192.0.0.0/24")


class FetchRefusedError(Exception):
    """A URL is not fetched, or its response is unusable. The text has the rule, nothing of the response."""


class UrlRefusedError(FetchRefusedError):
    """The URL itself is refused: its form, its scheme or its host."""


@dataclass(frozen=True, slots=True)
class FetchTarget:
    """A checked URL: host name, port, and path with query."""

    host: str
    port: int
    path: str


def check_url(
    url: str, hosts: Collection[str], *, schemes: Collection[str] = ("https",), ports: Collection[int] = (HTTPS_PORT,)
) -> FetchTarget:
    """The target of a URL. Raises UrlRefusedError, also for characters that two URL parsers read differently.

    hosts  exact names, or ".example.com" for all names below example.com
    """
    if len(url) > MAX_URL_LENGTH:
        raise UrlRefusedError(f"the URL has more than {MAX_URL_LENGTH} characters")
    if not url.isascii() or any(character <= " " or character in "\\\x7f" for character in url):
        raise UrlRefusedError("the URL has a character that is not allowed")
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UrlRefusedError("it is not a URL") from error
    if parts.scheme not in schemes:
        raise UrlRefusedError("only https URLs are fetched")
    host, default_port = parts.hostname or "", 80 if parts.scheme == "http" else HTTPS_PORT
    _check_host(host, parts.netloc.lower(), port)
    if (port or default_port) not in ports:
        raise UrlRefusedError(f"only port {HTTPS_PORT} is allowed")
    if not any(host == name or (name.startswith(".") and host.endswith(name)) for name in hosts):
        raise UrlRefusedError("the host is not in --allow-media-host")
    return FetchTarget(host, port or default_port, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))


def check_address(address: str) -> str:
    """The address in its plain form, if it is one of the public internet; FetchRefusedError."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    is_special = ip.is_multicast or ip.is_reserved or ip.is_unspecified or ip in PROTOCOL_ASSIGNMENTS
    if not ip.is_global or is_special or any(ip in network for network in TRANSLATED):
        raise FetchRefusedError("the host has an address that is not public")
    return str(ip)


def _check_host(host: str, netloc: str, port: int | None) -> None:
    if netloc not in (host, f"{host}:{port}"):
        raise UrlRefusedError("the URL has user information, or no plain host")
    if not _is_name(host):
        raise UrlRefusedError("the host must be a name, not an address")


def _is_name(host: str) -> bool:
    labels = host.split(".")
    is_plain = all(label and label.replace("-", "").isalnum() and label.isascii() for label in labels)
    # A resolver reads digits, and hexadecimal digits after 0x, in the last label as an address.
    return is_plain and not labels[-1].isdigit() and not labels[-1].startswith("0x")
