"""PyTorch programs into graphs.

`program.py` walks the exported graph; the `aten_*` files hold the converters, one function per operator or family.

`registry.py` is what a converter is, `context.py` what it works with. `export.py` makes an ExportedProgram of a module,
`mutation.py` and `decompose.py` rewrite one where converters alone do not suffice.
"""
