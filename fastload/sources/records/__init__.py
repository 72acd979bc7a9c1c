"""Records in shard files, as other loaders write them: MosaicML's MDS and TensorFlow's TFRecord.

`mds` and `tfrecord` yield the cells of each record and list the dataset; `record_table` makes samples of the cells.
"""
