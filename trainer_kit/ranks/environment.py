"""The environment of a rank: what torchrun would set, for ranks of this machine whose store the parent hosts.

The parent lets the system choose the port, so two runs never meet, and ranks join its store instead of opening their own; that is what
TORCHELASTIC_USE_AGENT_STORE means to torch's "env://".
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

ADDRESS = "127.0.0.1"


def rank_environment(base: Mapping[str, str], rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """`base` with the variables of one rank. Connections stay on the loopback interface unless `base` names another."""
    kept = {name: value for name, value in base.items() if not name.startswith("TORCHELASTIC_")}
    here = {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        kept.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    return kept | here
