"""Scoring of many documents: read, sorted by length, batched, on several threads, kept line by line.

`documents` says what a document is, `sources` where documents come from, `encoding` makes token ids of them, `scoring`
puts them together and computes, `results` keeps. Nothing here holds a corpus in memory.
"""
