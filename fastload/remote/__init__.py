"""Packed files behind a URL: requests to object stores and web servers, and what is kept of them on this machine.

Goes in: URLs, keys, ranges of bytes. Comes out: those bytes, or an error that says what was tried.

Read first: `options` (`Remote`: how to request, where to keep), `client` (requests that are repeated while that helps).
Then `throttle` (how many at once), `backend` (what a client asks of a kind of server), `cloud` (through obstore) and
`filesystems` (through fsspec).

`opening` reads a path or a URL, for commands; `contents` lists, checks and clears the cache.

Imports only `errors`, `system`, `format` and `timing`; no torch.
"""
