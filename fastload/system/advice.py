"""The advice of commands and reports, each text under a name: tests try every one of them, or model it.

Errors are not among these: they say themselves what to do, and end the command.
"""

from __future__ import annotations

CHANGES = {
    "reading": "pack the files (fastload pack) and feed them with FastLoader, or put them on a faster disk",
    "decoding": "decode once, with fastload pack, and feed the pixels with FastLoader",
    "transform": "move this Python code to the device (fastload.transforms has crops, flips, colour, erasing), or make "
    "it one call that frees the GIL",
    "collate": "return tensors of one shape and let torch's default_collate stack them, or use FastLoader, which fills "
    "batches in place",
    "hand-over": "return a few tensors a batch, not arrays or Python objects that are pickled; FastLoader passes slot "
    "numbers",
    "copy to the device": "copy while the step runs: pin_memory=True with .to(device, non_blocking=True), or "
    "FastLoader(device=...)",
    "worker start-up": "persistent_workers=True, so that workers live from epoch to epoch",
    "a slow sample now and then": "find out what is special about those samples, and pack, shrink or leave them out",
    "lock contention": "read without the lock: a file packed by fastload is read by any number of threads or processes",
    # of batches without images, or with images of their own sizes
    "reading without images": "read from a faster disk, or read more at once and keep it in memory",
    "decoding without images": "decode once, and keep the result",
    "collate without images": "return tensors of one shape and let torch's default_collate stack them",
    "hand-over without images": "return a few tensors a batch, not arrays or Python objects that are pickled",
    "copy to the device without images": "copy while the step runs: pin_memory=True with .to(device, "
    "non_blocking=True)",
    "transform without images": "make this Python code cheaper: work on whole batches, or one call for all of it that "
    "frees the GIL",
    "lock contention without images": "read without the lock: give each worker a file of its own, or read whole "
    "batches at once",
    # of a FastLoader
    "reading of FastLoader": "a faster disk, more memory for the page cache, or smaller images (fastload pack --size)",
    "transform of FastLoader": "let the GPU do it (device='cuda'), give it more workers, or pack smaller images "
    "(--size)",
    "copy to the device of FastLoader": "keep the rows there: FastLoader(cache='device')",
    "hand-over of FastLoader": "return fewer or smaller fields, each of one shape",
}
"""The change for a cause of a verdict, by the cause; and for batches without images or a FastLoader, where it differs.

Apart from the others: their names are made of the cause's, and one that has no change here must not find another text.
"""

ADVICE = {
    **CHANGES,
    # The machine, in `--version`, `bench` and the log of the first loader that is slow for it.
    "compiled loops": "fastload was installed without its compiled loops, so it decodes and crops images on the CPU at "
    "half to two thirds of the rate: install a C compiler, then fastload again.",
    "JPEG decoding": "neither Pillow nor the system has a shared libjpeg-turbo from 2.1.5 on, so JPEGs come at half the"
    " rate: install Pillow as a wheel, which brings one (pip install --force-reinstall --only-binary :all: pillow).",
    # `fastload info`
    "pack images again": "To fix this, pack the original images: `fastload pack IMAGES OUT.h5`.",
    "repack": "To fix this: `fastload repack FILE OUT.h5 {options}`.",
    "repack compressed": "To fix this: `fastload repack FILE OUT.h5 {options}`, which {does} it compressed, and "
    "decodes {size} for one image; or `--codec none`, which decodes nothing, in a file {growth} times as large.",
    "uint8": "Store uint8, and normalize on the device.",
    "stores": "For size and loading rate of other ways to store these images, give `--stores`.",
    "verify shards": "HDF5 shows a missing one as zeros: `fastload verify` before other programs",
    "pread": "do not truncate the file while training, which may end the process: PackedDataset(..., read='pread')"
    " survives it",
    "cache list": "`fastload cache list` says how much",
    "hdf5plugin": "{filter} (HDF5 filter {number}): pip install hdf5plugin",
    "zstandard": "zstd, row by row: pip install zstandard",
    "more fields": "and {count} more; `--json` lists all",
    "undecodable": "{count} more samples could not be decoded; `fastload pack` names them",
    # `fastload verify`
    "damaged": "Copy the file again, or pack it again",
    "source changed": "The file is what was packed. Where the source was changed on purpose, pack it again",
    "joined": "the file was joined from several sources: give each one to compare the other rows",
    "more damage": "and {count} more of these; `--json` lists all",
    # `fastload bench` and `fastload tune`
    "another size": "since these images differ in size (--size for another one)",
    "seconds for faults": "no read was delayed in that time (more --seconds would help)",
    "import crop": "from fastload.transforms import RandomResizedCrop.",
    "seconds for candidates": "The time was up before all candidates had run often enough; give more --seconds.",
    "other programs": "End those programs, and run it again.",
    "tune again": "run it again, once the cache holds the data. `fastload bench {url}` says what the network gives.",
    # `fastload cache`
    "clear cache": "its header in the cache cannot be read. Remove it: `fastload cache clear {url}`.",
    "room of the cache": "at most {limit}, nine tenths of the free disk space, or as Remote(max_bytes=...) sets it",
    # `fastload pack`
    "strict": "packed though libjpeg warns of them; `--strict` leaves such JPEGs out",
    "strict for kept JPEGs": "JPEGs kept as they are were not decoded: `--strict` leaves out those that libjpeg warns "
    "of.",
    "overwrite": "{path}: exists; packing needs `--overwrite` to replace it.",
    "store source": "Pixels take {times} times the bytes of these files: `--store source` keeps their JPEGs, to be "
    "decoded in each epoch; `--dry-run` shows size and loading rate of each choice.",
    "zstandard for masks": "Masks are stored as they are: to see whether zstd would make them smaller needs zstandard. "
    "Install it with: pip install zstandard.",
    "zlib-ng": "FastLoader reads it twice as fast after: pip install zlib-ng.",
    "zstandard to read": "To read them, as with any rows of varying length, needs: pip install zstandard.",
    "gzip for masks": "h5py and other HDF5 tools read them with zstd's filter (pip install hdf5plugin); `--codec gzip` "
    "does without.",
    "long": "Masks are packed as uint16, since their numbers go beyond 255; loss functions want `.long()`.",
    "shards of a plan": "Next, anywhere, for each I from 0 to {last}:\n"
    "  fastload pack {source} {output} --shard-index I\n"
    "and then:\n"
    "  fastload index {plan} -o {output}",
    # notes on what was found in a source
    "labels": "No column is called label: each stays a column of its own ({names}). Say `--labels`.",
    "labels of their own": "CHECK: each of {count} rows has a label of its own in column {name!r}, e.g. {first!r}: "
    "ids, or numbers to regress, which stay int64, rather than classes. If they are ids, name another column with "
    "`--labels`.",
    "boxes in a cell": "Column {name!r} holds boxes in one cell, taken for x, y, width, height, or as `--boxes` says.",
    "masks of VOC": "Only the images with masks are listed; `--masks none` lists all, with their classes.",
    "image column": "NOT READ: the images that column {name!r} names. `--image-column` names those to pack.",
    "image column of Parquet": "NOT READ: more images in {names}. `--image-column` names the column that is packed.",
    "mask files": "NOT READ: other masks, or pictures of them; `--mask-files` chooses",
    "palette": "{colours}: `--palette FILE` must say which is which class, in lines such as `128,0,0,building`.",
    "other palette": "{colours}, of the {count} classes in {file}; `--palette FILE` gives others, and with it "
    "`--ignore-index NAME` says which means no class.",
    "panoptic": "Panoptic masks are there, too: `--masks panoptic` packs them.",
    "masks of objects": "Masks were not drawn: `--masks semantic` or `--masks instance` does.",
    # The verdict on a loop (`doctor`, `bench`, `Meter`, `diagnose`): changes that are not for a cause alone
    "transform on the CPU": "make this Python code cheaper: smaller images, or one call for all of it that frees the "
    "GIL",
    "transform by FastLoader": "pack the images (fastload pack), and let FastLoader transform them",
    "hand-over as one": "hand each batch over as one tensor, and split it in the loop: it has {count} now",
    "worker start-up once": "make it cheaper: import less in the script that workers import again, or judge a longer "
    "run",
    "number of workers": "{name}={count} instead of {now}",
    "keep a copy": "ask for less, or keep a copy on this machine: {count} workers get no more than fewer do",
    "channels_last": "bring each batch's images into channels_last memory, in which this network takes less time",
    "decoding of FastLoader": "run fastload pack again, with --store raw (rows are copied then, of about {times} times "
    "the bytes) or with a smaller --max-size{workers}; `fastload info FILE --stores` has the numbers",
    # of a loop that waits for the network
    "keep on this machine": "keep the data on this machine",
    "more room": "give the cache room for more: Remote(max_bytes=...), of {room} now; the data are {size}, and {share} "
    "of what came had been evicted before",
    "room for all": "give the cache room for all: Remote(max_bytes=...), of {room} now; the data are {size}",
    "fewer requests": "send fewer requests: pack larger chunks (--chunk-bytes), or ask for a higher limit there",
    "more requests": "ask for more at once: Remote(in_flight={count}) instead of {now}",
    "share of a node": 'let each of {count} nodes keep a part of its own: FastLoader(share="node")',
    "nearer": "bring the data nearer: a bucket in this machine's region, or a faster network",
    "train on": "train on: later epochs find in the cache what the first one fetched",
    # what to type for a change
    "type number of workers": "DataLoader(..., num_workers={count})",
    "type workers that wait": "DataLoader(..., num_workers={count}); as fast if what they wait for answers {count} at "
    "once",
    "type channels_last": "images = images.contiguous(memory_format=torch.channels_last), first in the loop",
    "type persistent workers": "DataLoader(..., persistent_workers=True)",
    # where there is no verdict, or one without a cause
    "end other programs": "what limits it without them is not known: end them, and run it again",
    "longer run": "a longer run hides that: judge one of {count} steps or more",
    "few steps": "only {count} steps were seen: a longer run gives firmer figures",
    "slowed down": "something else slowed it down then, so measure again",
    "clock changed": "its clock, or other work on it, changed: measure again",
    "find out": "find out what the loader waits for",
    "diagnose": "this loader does not say what for, fastload.diagnose(loader) or `fastload doctor` does",
    "DALI": "what for was not seen, because DALI makes the batches outside of Python: try more num_threads or a larger "
    "prefetch_queue_depth",
    "FFCV": "what for was not seen, because FFCV makes the batches in compiled code: try more num_workers or "
    "os_cache=True",
    "torchdata": "what for was not seen, because the nodes make the batches on threads and processes of their own: try "
    "more num_workers in the ParallelMapper that takes longest",
    "nvidia-ml-py": "pynvml is not installed: pip install nvidia-ml-py",
    "more seconds": "after {seconds} s the command had not used two batches of a DataLoader; give more --seconds",
    "without isolation": "Start it without that, or use fastload.diagnose(loader) in it",
    "no DataLoader": "the command's Python never used torch's DataLoader, so there is no wait to measure; use "
    "fastload.Meter",
    "no steps": "Does the script load its data in another way? Then use fastload.Meter in it",
}


def advice(name: str, /, **values: object) -> str:
    """Returns an advice with its values, by name."""
    return ADVICE[name].format(**values)
