"""Records, a plan and a trace -> plain data -> one HTML file that needs no network."""
