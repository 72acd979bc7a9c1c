"""Finds the arguments of `FastLoader` that suit a file on this machine, by a short timed search (`fastload tune`).

In: a file and `TuneOptions`. Out: `Tuned`, with the figures of every candidate, the one chosen and why, and the call to
paste.

Read `search` first (races between candidates, the result, one timed run), then `candidates` (the options, the values
tried, and which candidate wins, a pure function of the figures). Uses steps and timed passes of `profiling.bench` and
the meter; not `report` or `cli`.
"""
