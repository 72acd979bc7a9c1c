"""COCO: images with the boxes and masks of `annotations/instances_*.json`.

`coco.list_coco` makes the Listing. Read first: `coco` (which file is about which images, boxes as columns, masks by
sample), `instances` (one JSON file into flat arrays), `masks` (regions parsed, and drawn when a mask is read). Only
boxes are packed unless masks are asked for.
"""
