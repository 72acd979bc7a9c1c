"""Joins the stages of the data path into `FastLoader`, the class that training scripts use.

Goes in: a packed file or a dataset, and options. Comes out: batches, tuples of tensors on the device; statistics, and
states to resume from.

Read first: `loader` (`FastLoader`: what is kept from epoch to epoch), then `iteration` (one pass, and the `Batch` that
it hands over). `epochs_ahead` reads the next epoch while one ends, `echo_policy` decides how often a batch is used.
`from_folder` reads a folder that is packed meanwhile.

Imports all stages; never `profiling` or `cli`, and prints nothing.
"""
