"""Modules that scripts of several folders of benchmarks import.

A process that runs with the packages of a second checkout imports these modules from that checkout, if it has them.
"""
