"""Scripts that measure and compare; README.md lists them.

This is a package only so that `benchmarks.shared` is found. Each script is run by its path. It imports modules of its
own folder by their names, and those of `shared` from here, wherever `txl_deploy` is imported from this checkout.
"""
