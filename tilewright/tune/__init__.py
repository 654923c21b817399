"""Choose configs for tasks."""
