"""Scripts that measure and compare; README.md lists them. A package only so that `benchmarks.shared` is found.

Each script is run by its path. Modules of its own folder it imports by their names, those of `shared` from here, which
works wherever `txl_deploy` is imported from this checkout.
"""
