"""Environment variables that name servers started elsewhere, their weight receivers, and their token."""

from __future__ import annotations

import os

ADDRESS_VARIABLES = ("LIGHTRL_SERVER_ADDRS", "AREAL_LLM_SERVER_ADDRS")
RECEIVER_VARIABLE = "LIGHTRL_RECEIVER_ADDRS"  # of the delta transport
TOKEN_VARIABLE = "LIGHTRL_SERVER_TOKEN"
RECEIVER_HELP = (
    "`lightrl serve` starts a weight receiver for its servers and prints its address. For other servers run "
    f"`{TOKEN_VARIABLE}=… python -m lightrl.engines.sglang.sync.receiver --host HOST --port PORT`, and set "
    f"{RECEIVER_VARIABLE}."
)


def as_url(address: str) -> str:
    """`host:port` as `http://host:port`, without a `/` at the end."""
    return (address if "://" in address else f"http://{address}").rstrip("/")


def receivers_from_environment() -> list[str]:
    """The addresses in LIGHTRL_RECEIVER_ADDRS; none if it is not set."""
    return _addresses(RECEIVER_VARIABLE)


def addresses_from_environment() -> list[str]:
    """The addresses in LIGHTRL_SERVER_ADDRS, or in AReaL's variable.

    Raises:
        ValueError: if neither is set.
    """
    for name in ADDRESS_VARIABLES:
        if addresses := _addresses(name):
            return addresses
    raise ValueError(
        "SGLangEngine needs urls, servers or LIGHTRL_SERVER_ADDRS. Set servers: 1 to start one on this machine."
    )


def _addresses(name: str) -> list[str]:
    return [as_url(part.strip()) for part in os.environ.get(name, "").split(",") if part.strip()]
