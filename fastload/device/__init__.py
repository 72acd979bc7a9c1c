"""Copies batches to the device they are used on, while the model computes.

Goes in: filled slots of the ring, host arrays. Comes out: tensors on the device; on the CPU tensors over the same
memory.

Read first: `copy` (the stage and its rules), then `backend` (the few operations it needs of a device, a protocol, so
that it is tested without a GPU).

Imports `errors` and `timing`; it knows neither files nor plans nor transforms.
"""
