"""What can be said of a bundle, as plain values: read and checked here, shown by whoever wants to.

The manifest and the engines' sidecars are among them as they are: a section reads there what needs no word of ours.

Every text in these values may come from a stranger's file and is as it was written there. Cutting and escaping it is
the business of what shows it: on the page that is one filter, which every text goes through. Only what becomes a
command, and what a terminal shows too (tables, sources), is cut here. Tables and curves have bounds in any case.
Where there is nothing to show, a `Missing` says why and how to get it.
"""
