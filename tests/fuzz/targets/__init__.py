"""Targets: modules with `one_input(data)`, which lets only documented errors through, and `seeds()`, first inputs."""

TARGETS = (
    "unpickler",
    "containers",
    "importers",
    "manifest",
    "graph",
    "foreign",
    "leapp",
    "weights",
    "vectors",
    "snapshot",
    "vocabulary",
    "sidecar",
    "texts",
    "bodies",
)
