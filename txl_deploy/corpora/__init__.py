"""Scoring of many documents: read, sorted by length, batched, on several processes, kept line by line.

`documents` says what a document is, `sources` where documents come from, `encoding` makes token ids of them, `batching`
puts them together, `scoring` computes, `results` keeps. Nothing here holds a corpus in memory.
"""
