from __future__ import annotations

from ipaddress import ip_address

import pytest

from modelyard.outbound import AddressGuard, PrivateAddress, host_name, is_public


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1"),
        *("::ffff:127.0.0.1", "2002:7f00:1::", "64:ff9b::a00:1"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


async def test_a_host_is_allowed_by_name_and_by_each_of_its_addresses() -> None:
    guard = AddressGuard(["*.Example.com", "localhost"])
    assert guard.allows("www.example.com")
    assert not guard.allows("example.org")
    with pytest.raises(PrivateAddress):
        await guard.resolve("localhost")
    assert "127.0.0.1" in await AddressGuard(["localhost"], allow_private=True).resolve("localhost")


def test_the_name_of_a_host_has_no_upper_case_and_no_dot_at_its_end() -> None:
    assert host_name(b"WWW.Example.com.") == "www.example.com"
