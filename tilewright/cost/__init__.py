"""Cost models: predict the time of a Config, and learn from measured ones."""
