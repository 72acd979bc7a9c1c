"""Makes batches ahead of the training loop, in threads or worker processes, in memory that is used again.

Input: planned batches, as rows of a packed file or indices of a dataset. Output: filled batches in the order
planned, as arrays over the slots of a ring, then as tensors on their device.

Read first: `ring` (the slots), then the feeds, which a loader keeps and which begin a stream for each pass:
`thread_stream` (threads read packed files; `row_transformer` lets them run transforms as well, `own_sizes` keeps images
in their own sizes, `device_decoder` has the device decode JPEGs), `process_stream` (worker processes run Python;
`worker_requests` asks them, `sample_worker` and `sample_layout` write samples to slots), `cached_feed` (rows kept in
memory; `cache_choice` decides where). `device_stage` copies batches to their device while the model computes.
`resolved` has a loader's options, which all of these obey, `inputs` its data; `auto_workers` chooses the number of
processes.

Imports everything up to `read`, `dataset`, `device` and `transforms`; never the loader.
"""
