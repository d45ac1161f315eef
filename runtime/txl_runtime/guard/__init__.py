"""A stranger's graph, checked before an engine sees it. `graph_check` is the door; the rest stands behind it."""
