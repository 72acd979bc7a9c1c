"""WebDataset: tar shards in which the files of one sample share a name.

`webdataset.list_webdataset` makes the Listing. Read first: `samples` (members of all shards grouped to samples, and
which file is the image), `fields` (the other files as columns), `webdataset`. Members are read in place by
`sources.archives`; nothing is unpickled.
"""
