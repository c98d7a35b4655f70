"""Whether an address can be reached from other machines."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Names other than localhost count as reachable: what they stand for can change."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
