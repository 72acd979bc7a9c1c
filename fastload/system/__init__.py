"""The operating system and the machine: CPUs, memory, files, threads; nothing about images or data sets.

Input: paths, file descriptors, process ids. Output: numbers (CPUs, bytes of free memory, share of a file in the
page cache), bytes of files, results of work done in threads.

Read first: `machine` (CPUs and memory this process may use), `files` (output files, reads of any length, the page
cache), `syscalls` (calls that keep the GIL). Then `threads` (over a stream; the GIL's switch interval), `text` (bytes
and sizes for people), `native` (compiled loops, where they were built).

Imports only `errors` and `timing`; no torch.
"""
