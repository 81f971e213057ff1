"""Environment variables that name servers started elsewhere, and their token."""

from __future__ import annotations

import os

ADDRESS_VARIABLES = ("LIGHTRL_SERVER_ADDRS", "AREAL_LLM_SERVER_ADDRS")
TOKEN_VARIABLE = "LIGHTRL_SERVER_TOKEN"


def as_url(address: str) -> str:
    """`host:port` as `http://host:port`."""
    return address if "://" in address else f"http://{address}"


def addresses_from_environment() -> list[str]:
    """The addresses in LIGHTRL_SERVER_ADDRS, or in AReaL's variable.

    Raises:
        ValueError: if neither is set.
    """
    for name in ADDRESS_VARIABLES:
        addresses = [part.strip() for part in os.environ.get(name, "").split(",") if part.strip()]
        if addresses:
            return [as_url(address) for address in addresses]
    raise ValueError(
        "SGLangEngine needs urls, servers or LIGHTRL_SERVER_ADDRS. Set servers: 1 to start one on this machine."
    )
