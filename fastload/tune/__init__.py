"""`fastload tune`: which arguments of `FastLoader` suit a file on this machine, by a short timed search.

`candidates` says what is tried, `trials` tries it, `search` races candidates against each other, `choose` decides.
"""
