"""The conformance list's runner and Python's driver: a package so that `conformance.driver` is found in a checkout.

`run.py` and `driver.py` are run by their paths; README.md has the protocol.
"""
