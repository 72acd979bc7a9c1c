"""Clocks, and the plain results that measurements end in. No torch here, unless it is imported already.

Input: what threads and processes do to a batch. Output: `BatchWork` (seconds by stage), `LoaderStats` (an epoch's
counts), `Measured` (everything that bench, doctor, tune and `Meter` print, draw and export).

Read first: `results` (the figures and their units), `stopwatch` (a thread's time split into stages), `probe` (how a
`FastLoader` reports each batch), `clocks` (the host's and a device's; what a device waited for).

Imports nothing else of fastload.
"""
