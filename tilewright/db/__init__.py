"""What tuning has found out, kept: append-only records in SQLite."""
