"""Score many documents: read them, sort by length, batch, score on several threads, write one line each.

`documents` defines a document, `sources` finds and reads documents, `encoding` turns them into token ids, `scoring`
batches and scores them, `results` writes the results. A corpus is never held in memory as a whole.
"""
