"""Packing what has no size beforehand: rows get their places in their order, as soon as all before them are made.

Workers encode tasks of consecutive rows. When the lengths of all earlier tasks are known, this process says where a
task's rows lie, and the worker that holds them writes them there, once. A sample that is left out never gets a place,
so that nothing is moved afterwards, and the bytes of the file do not depend on which worker was faster.

| file | what |
| --- | --- |
| `OUT.h5.part` | rows of images from byte 4096 on: in their final place, unless they are compressed as a whole |
| `OUT.h5.masks` | rows of masks, brought behind the images at the end |
| `OUT.h5.journal` | what is packed, and each task when its rows are written (`log`) |
| `OUT.h5.meta` | the twin in which HDF5 builds its metadata, and which holds compressed chunks |
"""
