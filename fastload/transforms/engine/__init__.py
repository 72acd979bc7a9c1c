"""Applies lists of transforms to batches: fuses neighbours into passes, and runs them on the CPU or on a GPU.

Input: a list of transforms, a batch of images (a tensor, or rows of a mapping that are not gathered yet) and draws.
Output: a new batch.

Read first: `pipeline` (a list applied to a batch), which it cuts into passes), then `placement` (crops,
resizes and flips as tables of numbers). `place` moves whole batches by plain torch and NumPy, `resample` sample by
sample on the CPU, `gpu` by the kernel of `triton_kernels`; `buffers` is the memory of outputs, and what sends to a
device.
`decode_time_resize` gives images of several sizes one size.

Imports the modules of `transforms`; nothing of files, loaders or threads.
"""
