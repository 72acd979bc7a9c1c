"""Reads rows of an HDF5 file, packed or foreign, into memory that is there already.

Input: a header (`PackedFile`) and row numbers. Output: arrays filled with rows, or decoded images of varying size;
hints to the kernel about rows that come next.

Read first: `reader` (`RowReader`, which chooses a way to read each field), then the ways: `linear` (from a mapping of
the file, or without one), `hdf5_chunks` (whole chunks of fields that are not one linear array; `format`'s
`chunk_filters` decompresses gzip and zstd without HDF5), `ragged_rows` (rows of varying length), `sharded` (rows of an
index).
`checked` reads images and masks of any file and compares them with their digests, for all that verifies, shows or
copies rows; `readahead` announces rows to the kernel.

Imports `errors`, `format`, `images`, `system` and `timing`; never torch.
"""
