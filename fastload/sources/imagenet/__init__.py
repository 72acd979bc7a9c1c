"""ImageNet ILSVRC2012 and sets named like it: class folders, Kaggle's form, or the original tars read in place.

`imagenet.list_imagenet` makes the Listing. Read first: `parts` (where images lie, and what their names say of split and
class), `imagenet` (labels, splits and counts), `devkit` (tables of classes and of the validation images). Nothing is
unpacked; only the devkit is read to memory.
"""
