"""Loop programs: the loop-nest IR, its verifier, interpreter and text form, and the default program of any task."""
