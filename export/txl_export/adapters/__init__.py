"""Adapters: each makes a `StepSpec` of a package's own module, so that nobody has to write the function by hand.

To add one, write a module here with the functions of `registry.AdapterModule`, and add one line to `table.ADAPTERS`.
The module imports its package inside a function, and reads the package's objects by their attributes.
"""
