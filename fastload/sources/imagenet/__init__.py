"""ImageNet ILSVRC2012 and sets named like it: class folders, Kaggle's form, or the original tars read in place.

`imagenet.list_imagenet` makes the Listing: it finds where images lie, and what their names say of split and class.
`devkit` parses the tables of classes and of the validation images. Nothing is unpacked; only the devkit is read to
memory.
"""
