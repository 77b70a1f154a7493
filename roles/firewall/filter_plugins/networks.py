"""Is an address inside one of some networks?"""

import ipaddress


def network(text: object) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(str(text), strict=False)
    except ValueError:
        return None


def inside_networks(address: str, networks: list[str]) -> bool:
    """Whether the address (a scope such as %eth0 does not count) lies in one of the networks."""
    where = ipaddress.ip_address(address.split("%")[0])
    return any(where in known for known in map(network, networks) if known)


def not_networks(networks: list[str]) -> list[str]:
    """Those that are neither a network nor an address."""
    return [text for text in networks if not network(text)]


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"inside_networks": inside_networks, "not_networks": not_networks}
