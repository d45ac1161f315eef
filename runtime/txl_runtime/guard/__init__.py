"""The check of a stranger's graph before an engine reads it. The entry is `graph_check`, which uses the
other modules.
"""
