"""The check of a stranger's graph before an engine reads it. `graph_check` is the entry; it uses the other modules."""
