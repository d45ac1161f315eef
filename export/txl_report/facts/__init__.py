"""Facts about a bundle, as plain values: read and checked here, shown by a page or a terminal.

The manifest and the engines' sidecars are among them unchanged: a section reads from them what needs no words.

Every text in these values may come from a stranger's file and is as it was written there. The code that shows it cuts
and escapes it: on the page that is one filter, which every text goes through. Only a text that becomes a command, or
that a terminal shows too (tables, sources), is cut here. Tables and curves have bounds in any case. A `Missing` stands
for a fact that does not exist, and says why and how to get it.
"""
