"""Zip and uncompressed tar archives as a Tree, read without unpacking.

`archive.list_archive` recognises the kind and returns the tree; `archive.list_inner_tar` does so for a tar inside a
tar. Read first: `members` (where a member lies, and the reader of a zip's members; a tar's are read by
`spans.FileSpans`), then `archive`; `zip` and `tar` list the members of one kind each. Nothing here knows a layout.
"""
