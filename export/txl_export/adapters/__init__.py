"""Makes a `StepSpec` from a package's own module, with one adapter per package, so that users need not write it.

To add an adapter, write a module here with the functions of `registry.AdapterModule`, and add one line to
`table.ADAPTERS`; `pytest tests/export/adapters/test_registry.py -k lacks` prints what is still missing. The module
imports its package inside a function, and reads the package's objects by their attributes.
"""
