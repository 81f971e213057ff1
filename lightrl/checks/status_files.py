"""The files that `lightrl status` reads of a run and a launch, and names for hosts that a launch has yet to get."""

from __future__ import annotations

import re
from collections.abc import Sequence

STATUS_FILE = "status.json"  # a run writes it
STATE_FILE = "launch.json"  # a launch writes it


def host_names(nodes: int) -> list[str]:
    """The hosts of a launch that has yet to get them, as the scripts name them."""
    return [f"${{hosts[{number}]}}" for number in range(nodes)]


def with_hosts(text: str, hosts: Sequence[str]) -> str:
    """A text with hosts in place of `host_names`; `?` for one that there is not."""
    host_by_name = dict(zip(host_names(len(hosts)), hosts, strict=True))
    return re.sub(r"\$\{hosts\[\d+\]\}", lambda name: host_by_name.get(name[0], "?"), text)
