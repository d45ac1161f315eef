"""Modules that scripts of several folders use.

A script that runs a process with another checkout's packages imports these there from that checkout, where it has them.
"""
