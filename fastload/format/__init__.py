"""The packed file, format versions 1 and 2: its definition, and the code that reads and writes its headers.

Input: arrays and options (writing), a path (reading). Output: a file laid out as below without its pixels, or a
`PackedFile` that describes it. Read first: `header` (`read_header`, `PackedFile`, `Field`), `writer` (`create_file`),
then `ragged` (rows of varying length), `texts`, `codecs` (compression), `digests`. Imports only `errors`, `timing` and
`system`; no torch.

A packed file is a standard HDF5 file (superblock of HDF5 1.10, no user block) that any HDF5 tool opens. All datasets
are in the root group and have first dimension N, the number of samples, except ragged ones, see below.

| dataset | type, shape | storage |
| --- | --- | --- |
| `images` | uint8 or uint16 (N, H, W, C), C = 1, 3 or 4 | chunks (K, H, W, C), see below; absent for tokens alone |
| `masks` | uint8 or uint16 (N, H, W); attributes `ignore_index`, `names`, `source_values` | likewise; optional |
| `labels` | int64 (N,), or uint8 (N, A) for attribute vectors of 0 and 1; attribute `names` | contiguous; optional |
| any other | fixed-shape numeric (N, ...): `identity`, `boxes`, `landmarks`, `tokens`, ... | contiguous; optional |
| `caption` | fixed-length UTF-8 (N, M), up to M texts a row; `num_captions` int64 (N,) | contiguous; optional |
| `split` | uint8 (N,), attribute `names`; each split is one contiguous run of rows | contiguous |
| `key` | fixed-length UTF-8 (N,), the path relative to the source, undecodable bytes as `\\xNN` | contiguous |
| `digest` | uint64 (N,), XXH3-64 of the row's `images` bytes followed by its `masks` bytes | contiguous |
| `digest_fields` | uint64 (N,), XXH3-64 of the row's bytes in all other datasets but `digest`, by name | contiguous |

A label of -1 says that the sample has none. Integers are little-endian. Coordinates (`bbox`, `boxes`, `landmarks`,
`keypoints`) are pixels of the packed image, x before y, unless an attribute `coordinates` says otherwise; attribute
`names` says what their numbers are. `boxes` (N, M, 4) are padded with zeros, `box_labels` and `segment_labels` (N, M)
with -1. `keypoints` float32 (N, M, K, 3) of the boxes are x, y and visibility (0: not labelled, then all three are 0;
1: hidden; 2: visible); attributes `names` of the K points, `skeleton` (numbers of joined points, in pairs) and
`flip_pairs` (K numbers: the point that each becomes in a mirrored image), as far as they are known.

**Texts** have the fixed length of the longest, as in `key`; row i has the first `num_captions[i]` of `caption[i]`,
the rest is empty, and no text ends in a zero byte. Texts of varying length would be objects on HDF5's heap,
which readers refuse, or bytes with offsets, which other tools show as bytes and older releases refuse. Measured on
texts like COCO's (5 to 7 an image of 52 bytes, the longest of 250): 6.5 times their own bytes, about 1 % of a file of
224 px images; 256 rows are read in 0.67 ms, through offsets in 0.94. Where a few long ones would take many times what
all say (one of 10 kB among 50,000 of 60 bytes: 160 times), packing refuses them, unless they are cut.

**Versions.** A file is of version 1, unless its `masks` are uint16: of version 2, which differs in nothing else.
Readers of version 1 would cut such masks to 8 bits on some paths, so they have to refuse them.

**Pixels.** Pixel datasets are, on disk, one linear array: allocated early, no fill value written, no filter,
shape == maxshape, so that HDF5 lays their chunks back to back. The first chunk of `images` begins at byte 4096 whatever
N is, so row i begins at `4096 + i * row_bytes`. Chunks hold K = max(1, min(N, chunk_bytes // row_bytes)) whole rows;
the last one is allocated in full and zero behind row N. With a codec they pass through HDF5's gzip or zstd filter
instead; then rows have no offset, and digests are of their decoded bytes. Each zstd frame, of a chunk or of a ragged
row, ends in a checksum of its content; the frames of release 0.1.0 do not, and a frame's header says which it is.

**Rows of varying length.** Where images differ in size, or are kept encoded, `images` (and `masks`) is ragged:
uint8 (T,), the encoded rows one after another, on disk one linear array in chunks of `chunk_bytes`. Each row lies whole
inside one chunk; a row larger than a chunk begins at a chunk's first byte, and the row after it at another chunk's.
Attributes of the dataset: `row_shape`, (H, W, C) or (H, W) with 0 where rows differ, and `row_dtype`, "uint8" or
"uint16". The index of ragged `images` is in plain datasets of N rows:

| dataset | type, shape | meaning |
| --- | --- | --- |
| `images_offset` | int64 (N,) | the row's first byte, counted from the beginning of the dataset |
| `images_bytes` | int64 (N,) | its length |
| `images_shape` | int32 (N, 3) | H, W, C of its pixels, decoded and upright |
| `images_encoding` | uint8 (N,), attribute `names` | 0 raw: little-endian pixels; 1 jpeg; 2 zstd: raw, compressed |
| `images_orientation` | uint8 (N,) | EXIF orientation still to be applied to a JPEG; else 1 |

The index of ragged `masks` is `masks_offset`, `masks_bytes` and `masks_encoding`; a mask has its image's size, and is
never a JPEG. The `digest` of a row is computed from its pixels, as everywhere; only for a JPEG from its bytes.

**Root attributes.** `fastload_version` (1 or 2; of an index the newest of its shards), `fastload_writer`, `decoder`
(names and versions of the libraries that decoded the pixels), `source_layout`, `pack_options` (JSON; only what shapes
bytes), `seed`, `shuffled` (rows were shuffled within each split), `repacked` (JSON; if the file was made from packed
files: what was chosen and joined), and `header_digest`: XXH3-128 (hex) over the JSON description of every dataset
(shape, dtype, chunks, offset, attributes) and of the root attributes, then the bytes of `digest` and `digest_fields`.
It identifies the file. There are no time stamps: the same source and options give the same bytes.

**An index** makes one dataset of several packed files, its shards, which lie in its folder or below it. It has the root
attributes `fastload_index` (1), `num_rows`, `split_names`, `split_rows` (rows of each split, in order) and those above;
its `header_digest` is over the root attributes and both groups:

| dataset | type, shape | meaning |
| --- | --- | --- |
| `shards/name` | UTF-8 (S,) | path of each shard, relative to the index's folder, with `/`, without `..` |
| `shards/num_rows`, `bytes`, `chunk_rows` | int64 (S,) | its rows, bytes of its file, rows of a chunk of images |
| `shards/images_offset` | int64 (S,) | the byte at which its images begin; -1: they do not lie in one piece |
| `shards/header_digest` | UTF-8 (S,) | its `header_digest` |
| `shards/fields` | uint8 (T,) | JSON: shape, type, names, attributes of each dataset; `chunk_rows` as of one file |
| `pieces/shard`, `first`, `rows` | int64 (P,) | the rows in order, split by split: which shard's, from where |

For other programs every dataset of the shards is in its root group, too, as a virtual dataset; `images_offset` and
`masks_offset` are real ones, counted from the beginning of the first shard's bytes, and so is `split` where its numbers
differ. fastload itself never reads through a virtual dataset: HDF5 returns zeros for a shard that is missing, or that
the limit on open files keeps it from opening, and says nothing.

**Other HDF5 files** are described in the same terms: a dataset whose rows do not lie back to back has no offset and is
read through h5py. External links and storage, virtual datasets, object types and offsets outside the file are refused;
nothing is ever unpickled.
"""

CHUNK_BYTES = 8 * 2**20
"""Intended bytes of a chunk: enough for any disk to be fast, and small enough to read 16 of them at once."""
