"""Starts Ray on a node: `python -m tilewright.measure.pool.launch ARGUMENTS OF ray start`.

Ray replaces 127.0.0.1 by the machine's address in the network, and listens there. A pool on loopback is to be reached
from this machine alone, so what Ray asks for its own address is answered with loopback here. Ray
also starts its client's server on port 10001 if the packages for it are installed: a pool does not use it.
"""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> None:
    from ray._private import services
    from ray.scripts import scripts

    scripts.get_ray_client_dependency_error = lambda: "a pool does not use it"
    if "--node-ip-address=127.0.0.1" in arguments:
        services.get_node_ip_address = lambda address=None: "127.0.0.1"
    sys.argv = ["ray", "start", *arguments]
    scripts.main()


if __name__ == "__main__":
    main(sys.argv[1:])
