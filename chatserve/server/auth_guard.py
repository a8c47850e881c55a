"""Slows down whoever tries keys, by the address it tries them from.

An address may be wrong a number of times a minute. Beyond that nothing that could be a guess is accepted from it, not
even if it is right, or guessing would go on at full speed. What nobody finds by guessing stays welcome, so that one
client with a bad key locks out nobody behind the same NAT or proxy: every key of `UNGUESSABLE_CHARS` or more.

The limit of this is short keys at an address that many share. One that worked from there within the last hour stays
welcome, which its owner needs, and so can be guessed there as fast as anyone sends; one that did not is kept out for
as long as somebody there keeps sending wrong keys. Long keys have neither trouble, nor have clients whose proxy is
named in `ServerConfig.trusted_proxies`, as each is counted under its own address.

Pure: time is an argument. Knows addresses and key ids, no tenants, and of a key no more than its length;
`chatserve.server.auth` is its only caller.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

from chatserve.errors import RateLimitError
from chatserve.tenancy.limits import Meter

WRONG_KEYS_PER_MINUTE = 20
"""Wrong keys an address may send at once, and per minute in the long run."""

REMEMBERED_SECONDS = 3600.0
"""How long a short key that worked from an address is no guess there."""

UNGUESSABLE_CHARS = 32
"""Length from which a key is taken for random: 128 bits where it is hexadecimal, as ``openssl rand`` prints it."""

MAX_ADDRESSES = 4096
MAX_KNOWN = 16_384
"""Addresses with wrong keys, and pairs of address and key that worked, kept at most; the oldest go first."""

_IPV6_NETWORK_BITS = 64
_MAX_ADDRESS_CHARS = 64


def is_guessable(key: str) -> bool:
    """Whether a key is so short that whoever tries many may find it."""
    return len(key) < UNGUESSABLE_CHARS


class KeyGuard:
    """What is remembered of the addresses that keys come from."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[str, Meter] = OrderedDict()
        self._known: OrderedDict[tuple[str, str], float] = OrderedDict()

    def wrong(self, address: str, now: float) -> None:
        """A key that is not known here came from ``address``.

        Raises:
            RateLimitError: too many did; the caller is told this instead of what was wrong.
        """
        network = network_of(address)
        self._refuse(network, now)
        meter = self._wrong.setdefault(network, Meter())
        self._wrong.move_to_end(network)
        meter.add(WRONG_KEYS_PER_MINUTE, 1, now)
        if len(self._wrong) > MAX_ADDRESSES:
            self._wrong.popitem(last=False)

    def right(self, address: str, key_id: str, now: float) -> None:
        """A key that is guessable is right, and came from ``address``.

        Raises:
            RateLimitError: it may be the result of guessing.
        """
        network = network_of(address)
        until = self._known.get((network, key_id))
        if until is None or until < now:
            self._refuse(network, now)
        self._known[network, key_id] = now + REMEMBERED_SECONDS
        self._known.move_to_end((network, key_id))
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _refuse(self, network: str, now: float) -> None:
        meter = self._wrong.get(network)
        wait = 0.0 if meter is None else meter.wait(WRONG_KEYS_PER_MINUTE, 1, now)
        if wait:
            raise RateLimitError(
                "Too many wrong keys came from this address. Wait, and check the key that you send.",
                code="too_many_wrong_keys",
                retry_after=wait,
            )


def network_of(address: str) -> str:
    """Whose an address is: itself for IPv4, the /64 for IPv6, which one customer has all of."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address[:_MAX_ADDRESS_CHARS]  # what a proxy calls its client
    if ip.version == 4:
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((int(ip), _IPV6_NETWORK_BITS), strict=False))
