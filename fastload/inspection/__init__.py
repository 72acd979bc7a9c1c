"""Looks at files without changing them: contents and layout, damage, shuffle quality, a picture.

In: a packed file, for most functions also another HDF5 file of images. Out: frozen dataclasses with a `to_dict` for
JSON, or a PNG.

Read `info` with `chunk_layout` (contents, and what makes a file slow), then `verify` (every row against its digest, and
against its source image), `shuffle_quality` (how well each order mixes), `preview` (a contact sheet). Works without
torch. Must not import the loader or `profiling`.
"""
