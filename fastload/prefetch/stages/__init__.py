"""The stages of the data path, one idea a module; `recipe.py` puts them together.

rows           copies rows from the file, reads texts, stores fields in the slot, makes tensors of it
cut            decodes what a crop shows of ragged images, and gives them one size
transform      runs transforms: in the threads, or for each use; draws their numbers ahead
variable_size      images that keep their own sizes: decoded, transformed one by one, padded
device_decode  stored JPEGs, decoded by the device
cached         rows that are in memory already
to_device      copies a slot to the device
samples        samples that Python code makes, in worker processes
"""
