"""Reads rows of a dataset, packed or foreign, into memory that is there already.

Input: a header (`PackedFile`) and row numbers. Output: arrays filled with rows, or decoded images of varying size;
hints to the kernel about rows that come next.

Read first: `row_table` (`RowTable`: in which file a row lies), `store` (`Store`: those files, open and unchanged while
rows are copied; `remote_store` for a URL), `reader` (`Rows`: gathers batches of them). Then the ways to read one file,
an `OpenFile`: `linear` (from a mapping of it, or without one), `hdf5_chunks` (whole chunks of fields that are not one
linear array; `format`'s `chunk_filters` decompresses gzip and zstd without HDF5); and `encoded` (rows of varying
length), `row_check` (digests). `checked` reads images and masks of any file and compares them with their digests, for
all that verifies, shows or copies rows; `readahead` announces rows to the kernel.

Imports `errors`, `format`, `images`, `remote`, `system` and `timing`; never torch.
"""
