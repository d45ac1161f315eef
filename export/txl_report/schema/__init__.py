"""Define the JSON that commands write, as structs: `verify` and `bench` build them, tables and pages read them.

`verification` is report.json and the output of `verify --json`; `measurement` is the output of `bench --json`;
`reading` reads such files strictly, because a stranger may have changed them. Files of older versions are read as well,
and are converted to today's form.
"""
