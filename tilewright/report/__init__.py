"""Reports: from records, a plan and a trace to plain data, and to one HTML file that needs no network."""
