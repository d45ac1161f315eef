"""What commands write as JSON, as structs: whoever computes builds them, tables and pages read them.

`verification` is report.json and the output of `verify --json`, `measurement` the output of `bench --json`; `reading`
says how strictly a file is read that a stranger may have changed. What older versions wrote is read too, and has
today's form once it is read.
"""
