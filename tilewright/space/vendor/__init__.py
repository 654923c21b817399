"""Tasks as calls of a vendor's libraries, and the kernels of ours before and behind them."""
