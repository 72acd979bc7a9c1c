"""Datasets kept as arrays: NumPy's .npy and .npz, and HDF5 files that fastload did not write.

`npy` and `hdf5` each read the headers of their files into NamedArrays; `named.samples_of_arrays` decides which array
holds images, masks or labels, and of which split, and makes the samples. Read first: `named`, then `npy`. `raw_rows`
reads rows of one shape from a flat file or from memory; MNIST and merging use it too.
"""
