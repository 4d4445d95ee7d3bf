from __future__ import annotations

from farandole.node.mesh.reach.gateway import gateway_of_bsd, gateway_of_linux

HEADER = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"


def route(destination: str, gateway: str, flags: str, metric: int, mask: str = "00000000") -> str:
    return f"eth0\t{destination}\t{gateway}\t{flags}\t0\t0\t{metric}\t{mask}\t0\t0\t0\n"


def test_of_linux_the_default_route_with_the_smallest_metric() -> None:
    routes = [
        route("0001A8C0", "00000000", "0001", 0, "00FFFFFF"),
        route("00000000", "0101A8C0", "0003", 600),
        route("00000000", "FE01A8C0", "0003", 100),
        route("00000000", "0201A8C0", "0002", 0),  # down
    ]
    assert gateway_of_linux(HEADER + "".join(routes)) == "192.168.1.254"
    assert gateway_of_linux(HEADER + routes[0]) is None
    assert gateway_of_linux("") is None


def test_of_macos_what_route_says() -> None:
    told = "   route to: default\ndestination: default\n    gateway: 192.168.1.1\n  interface: en0\n"
    assert gateway_of_bsd(told) == "192.168.1.1"
    assert gateway_of_bsd("    gateway: fe80::1%en0\n") is None
    assert gateway_of_bsd("route: writing to routing socket: not in table\n") is None
