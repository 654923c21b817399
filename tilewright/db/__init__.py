"""The tuning database: append-only records in SQLite."""
