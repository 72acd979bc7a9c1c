"""Makes batches ahead of the training loop, in threads or worker processes, in memory that is used again.

Input: planned batches, as rows of a packed file or indices of a dataset. Output: works in the order planned, as tensors
over the slots of a ring, or on their device.

Read first: `work` (a batch on its way, and the stages on it) and `recipe` (which steps a loader's batches take, and
where; the steps are in `stages/`), then `producer`, which takes works from a `pool`, in order, and brings them to their
device: `thread_pool` (threads run stages) or `process_pool` (worker processes run Python; `sample_worker` and
`sample_layout` write samples to slots). `ring` has the slots, `row_cache` rows kept in memory. `loader_plan` has a
loader's options, which all of these obey, `inputs` its data; `auto_workers` chooses the number of processes.

Imports everything up to `read`, `dataset`, `device` and `transforms`; never the loader.
"""
