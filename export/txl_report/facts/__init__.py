"""Read and check the facts about a bundle as plain values, which a page or a terminal shows.

The manifest and the engines' sidecars are passed on unchanged: a section takes facts that need no words from these two.

Every text in these values may come from a stranger's file, and is unchanged. The code that shows a text shortens and
escapes it; on the page one filter does so for every text. Only texts that become a command, or that a terminal also
shows (tables, sources), are shortened here. Tables and curves are always limited in length. A `Missing` replaces a fact
that does not exist, and says why it is missing and how to get it.
"""
