"""Datasets kept as arrays: NumPy's .npy and .npz, and HDF5 files that fastload did not write.

`npy` and `hdf5` each read the headers of their files into NamedArrays; `named.list_named_arrays` makes one Listing of
these. Read first: `roles` (which array holds images, masks, labels, and of which split), `named`, then `npy`.
`raw_rows` reads rows of one shape from a flat file or from memory; idx files (MNIST), CIFAR and merging use it too.
"""
