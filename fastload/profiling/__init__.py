"""Measures where the time of a training loop goes, and says what to change.

In: a loader, a training script, or a packed file. Out: `Measured` (`fastload.timing.results`) with a verdict, as text,
JSON or an HTML report.

    meter     times the steps of a loop and reads the machine's counters (`fastload.Meter`)
    verdict   names what limits a loop, from such measurements
    doctor    runs an unmodified script and judges it (`fastload doctor`, `fastload.diagnose`)
    bench     measures a packed file's loader (`fastload bench`)
    tune      searches the loader's arguments (`fastload tune`)
    report    writes all of these as an HTML page (`fastload.write_report`)

Read them in this order. Nothing outside `cli` and `fastload/__init__` imports this package.
"""
