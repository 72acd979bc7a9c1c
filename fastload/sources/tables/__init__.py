"""Tables that name images: CSV, TSV, JSON lines or Parquet, and how any table's columns become those of a Listing.

`manifest.list_manifest` makes the Listing. Read first: `read_table` (a file into cells), `image_tables` (which tables
name the images, and by which column), `image_index` (the file that a cell means), `values` and `frame` (cells into
splits, labels and other columns), `boxes`, then `manifest`. Parquet with images inside, Arrow, named arrays, WebDataset
and `fastload export` use `values` and `frame` too. `celeba_text` parses CelebA's text files.
"""
