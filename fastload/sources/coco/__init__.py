"""COCO: images with the boxes and masks of `annotations/instances_*.json`.

`coco.list_coco` makes the Listing. Read first: `coco` (which file is about which images, boxes as columns, masks by
sample, drawn when one is read), then `instances` (one JSON file into flat arrays). Only boxes are packed unless masks
are asked for.
"""
