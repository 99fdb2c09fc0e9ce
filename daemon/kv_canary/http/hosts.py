"""Host names and addresses: what a Host or Origin header names, and which addresses are loopback or all of them.

Pure functions without any lookup: they must not block the HTTP thread.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit


def host_name(header: str) -> str | None:
    """The name or address of a Host header, without port, brackets and final dot; None when it is no host at all."""
    try:
        parts = urlsplit("//" + header)
        _ = parts.port  # raises when it is not a number
    except ValueError:
        return None
    if parts.netloc != header or "@" in header or not parts.hostname:
        return None
    return parts.hostname.rstrip(".") or None


def origin_host(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    address = address_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def is_wildcard(host: str) -> bool:
    address = address_of(host)
    return address is not None and address.is_unspecified


def own_names() -> frozenset[str]:
    name = socket.gethostname().lower()  # no lookup: it must not block
    return frozenset({name, name.partition(".")[0]})
