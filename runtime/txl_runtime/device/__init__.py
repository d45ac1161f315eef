"""Modules that run the loop on a GPU: device memory, queues of work, recorded work, and engines."""
