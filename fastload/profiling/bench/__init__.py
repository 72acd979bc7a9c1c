"""Measures how fast a packed file can be loaded on this machine, and whether training waits for it (`fastload bench`).

In: a file and `BenchOptions`. Out: a `BenchResult` with the rates of the loader alone, of a bare copy of the same rows,
of a training loop, of a plain `DataLoader` of the same samples, and of the loop under injected faults. Rates to be
compared are always measured in interleaved pairs.

Read `benchmark` first (the parts in order), then `subject` (the file under test and its loaders), `passes` (timed
passes and pairs), `training_loop`, `rivals`, and `faults`. Imports the loader, the
meter and the verdict; not `tune`, `report` or `cli`.
"""
