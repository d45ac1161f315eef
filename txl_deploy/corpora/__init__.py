"""Score many documents: read, sorted by length, batched, on several threads, kept line by line.

`documents` defines a document, `sources` finds and reads documents, `encoding` turns them into token ids, `scoring`
batches them and computes, `results` keeps. Nothing here holds a corpus in memory.
"""
