"""The ways in which a task could be computed: spaces of Configs, made by templates."""
