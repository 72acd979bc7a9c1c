"""Objects of stores and web servers: requests for them, and what of packed files there is cached on this machine.

Input: URLs, ranges of bytes, the chunks that rows lie in. Output: those bytes, requested again while that helps;
sparse copies of shards, filled chunk by chunk, that are read as any packed file is; objects written.

Read first: `urls` (`Remote`), then for requests `client` (with `throttle`, and `cloud` and `filesystems` for kinds of
servers), and for packed files `open_url`, `remote_shards`, `chunks` (which bytes), `sparse_copies` (where they are
kept), `fetch` (when) and `evictor` (which go).

Imports `errors`, `system`, `timing` and `format`; no torch.
"""
