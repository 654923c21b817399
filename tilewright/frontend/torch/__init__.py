"""Convert PyTorch programs to graphs.

`program.py` walks the exported graph; the `aten_*` files hold the converters, one function per operator or family.

`registry.py` defines what a converter is, `context.py` the builder that it uses. `export.py` exports a module, and
`mutation.py` and `decompose.py` rewrite a program if converters alone do not suffice.
"""
