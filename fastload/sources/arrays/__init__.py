"""Datasets kept as arrays: NumPy's .npy and .npz, and HDF5 files that fastload did not write.

`npy` and `hdf5` each read the headers of their files into NamedArrays; `named.samples_of_arrays` makes the samples of
one listing of these. Read first: `roles` (which array holds images, masks, labels, and of which split), `named`, then
`npy`. `raw_rows` reads rows of one shape from a flat file or from memory; MNIST, CIFAR and merging use it too.
"""
