"""Measuring on many machines: a pool of builders and timers on Ray, behind the runner's protocol.

    driver   PoolRunner (`driver.py`) gives builds to any builder and trials to timers of the wanted device,
             gives them again where a node fails, and counts each trial once
    node     Builder and Timer (`actors.py`), Ray actors that wrap the local build and timing processes
    wire     what travels between them (`wire.py`): msgspec bytes, checksummed and signed with a key of the pool's token
    cluster  starting, joining, listing and stopping nodes (`cluster.py`)

Ray is an extra (`pip install tilewright[ray]`); only `actors.py`, `driver.py` and `cluster.py` import it, when used.
Whoever holds the pool's token can run code on its nodes: the token is the boundary (docs/security.md).
"""
