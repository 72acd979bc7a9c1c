"""The ordered engine: packs rows whose length is only known once they are made.

Workers encode tasks of consecutive rows. When the lengths of all earlier tasks are known, this process computes the
offsets of a task's rows, and the worker that holds them writes them there, once. A skipped sample never gets an offset,
so nothing is moved afterwards, and the bytes of the file do not depend on which worker was faster.

| file | content |
| --- | --- |
| `OUT.h5.part` | rows of images from byte 4096 on: at their final offsets, unless whole chunks are compressed |
| `OUT.h5.masks` | rows of masks, copied behind the images at the end |
| `OUT.h5.journal` | what is packed, and each task when its rows are written |
| `OUT.h5.meta` | the file in which HDF5 builds its metadata, and which holds compressed chunks |

Read `ordered_engine` first, then `ordered_tasks` (tasks, `streams`: where their rows go), `ordered_begin` and
`record_log` (continuing after a kill), `ordered_finish`. Imports the modules of `fastload.pack`, but not its `engine`.
"""
