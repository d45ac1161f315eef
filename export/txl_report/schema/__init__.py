"""Structs of the JSON that commands write: the code that computes builds them, tables and pages read them.

`verification` is report.json and the output of `verify --json`, `measurement` the output of `bench --json`; `reading`
has the strictness with which a file is read that a stranger may have changed. Files of older versions are read too, and
are converted to today's form.
"""
