"""Parquet and Arrow files that hold the images themselves, as on the Hugging Face Hub.

`parquet.list_parquet` makes the Listing of a folder or file. Read first: `shards` (one file: its columns, images and
classes that `datasets` wrote into its schema, and where the bytes of images lie; all files as one table), then
`parquet` (also images and masks by column). Labels, boxes and splits are found as in any table, by `sources.tables`.
pyarrow is imported only inside functions.
"""
