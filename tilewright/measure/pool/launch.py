"""Starts Ray on a node: `python -m tilewright.measure.pool.launch ARGUMENTS OF ray start`.

Ray replaces 127.0.0.1 by the machine's address in the network, and listens there. A pool on loopback is to be reached
from this machine alone, so what Ray asks for its own address is answered with loopback here.
"""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> None:
    from ray._private import services
    from ray.scripts.scripts import main as ray_main

    if "--node-ip-address=127.0.0.1" in arguments:
        services.get_node_ip_address = lambda address=None: "127.0.0.1"
    sys.argv = ["ray", "start", *arguments]
    ray_main()


if __name__ == "__main__":
    main(sys.argv[1:])
