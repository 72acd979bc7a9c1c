"""Runs an unmodified training script and names what limits its speed (`fastload doctor`, `fastload.diagnose`).

In: a command. `command` runs it with the package `injected` imported into each of its Python processes, by the module
in `inject/`; the package times the loaders from inside and appends events to files. Out: `Examined` with the
measurements and a verdict (`profiling.verdict`).

Read `examine` first (from command to verdict), then `command` (running it), `injected` (its docstring lists the
events), `loader_records` (events read and grouped by loader; the cost of a batch and a step), `kernel` (waits seen by
the kernel), `in_process` (`diagnose`).
"""
