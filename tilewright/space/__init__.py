"""The search space: the implementations of a task, as spaces of Configs made by templates."""
