"""Joins the stages of the data path into `FastLoader`, the class that training scripts use.

Input: a packed file or a dataset, and options. Output: batches, tuples of tensors on the device; statistics, and
states to resume from.

Read first: `loader` (`FastLoader`: all that lasts from epoch to epoch), then `iteration` (one pass, and its
`Batch`es). `loader_options` says what the arguments mean for data, rank and machine; `echo_policy` decides how often a
batch is used.

Imports all stages; never `profiling` or `cli`, and prints nothing.
"""
