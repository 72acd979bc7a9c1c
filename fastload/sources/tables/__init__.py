"""Tables that name images: CSV, TSV, JSON lines or Parquet, and how any table's columns become a Listing's.

`manifest.list_manifest` makes the Listing. Read first: `read_table` (a file into cells, cells into values),
`image_tables` (which tables name the images, and by which column), `image_index` (the file that a cell means), `frame`
(values into splits, labels and other columns), `boxes`, then `manifest`. Parquet with images inside, Arrow, named
arrays, WebDataset and `fastload export` use `frame` too.
"""
