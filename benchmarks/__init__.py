"""Scripts that measure and compare; README.md lists them.

Each script is run by its path, and imports the modules of its own folder by their names. `benchmarks` is a package only
so that scripts can import `benchmarks.shared`, wherever `txl_deploy` is imported from this checkout.
"""
