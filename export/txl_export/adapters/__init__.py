"""Adapters: from a package's own module to a `StepSpec`, so that nobody has to write the function by hand.

To add one, write a module here with the functions of `registry.Adapter` and add one line to `registry.ADAPTERS` and to
`txl_export.options.AdapterName`. It imports its package inside a function, and reads modules by their attributes.
"""
