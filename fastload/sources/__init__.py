"""Datasets as they lie on disk: recognises the layout of a folder, archive, table or array file, and lists its samples.

In goes a path, with SourceOptions for what the files themselves do not say. Out comes a Listing: for each sample its
key, split and columns, and an object that reads its image (and mask) from any process. Nothing is decoded or unpacked.

Read first: `listing` (what a source returns), `tree` and `open_tree` (the files of a folder or archive), `folder` (the
plainest layout), `assemble` (the end of every layout; images with masks), `spans` (readers of pieces of files),
`layouts` (all of them, and how one is recognised). What tables of all formats share is in `tables`, and in
`manifest` what names images in them.

To add a layout: one new module here with `list_NAME` and `NAME_evidence`, its mirrored test, one entry in
`layouts.LAYOUTS`. Importing `layouts` imports all of them: a tenth of a second that `fastload info` does without.
This package imports only errors, format, images and system, and never torch.
"""
