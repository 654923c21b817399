"""How long a Config would take: models that predict, and learn."""
