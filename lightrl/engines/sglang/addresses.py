"""Where the servers are that somebody else started, and what they ask for: the environment's variables."""

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
        found = [part.strip() for part in os.environ.get(name, "").split(",") if part.strip()]
        if found:
            return [as_url(part) for part in found]
    raise ValueError(
        "SGLangEngine has neither urls nor servers, and LIGHTRL_SERVER_ADDRS is not set, expected one of them. Say "
        "servers: 1 to start one on this machine."
    )
