"""Turns the bytes of one image into pixels.

Input: an image file's bytes, the size, channels and depth wanted. Output: a header (`ImageHeader`), or pixels in
memory that the caller gives, upright; `ImageError` with the reason where that is impossible.

Read first: `image_header` (a file's header), `decode` (a whole file, while packing), `fit` (resizing images, and moving
coordinates alike), `decode_part` (encoded rows of a packed file, maybe only a window of a JPEG, while training). A JPEG
is decoded by `decode.run_libjpeg`, and by Pillow if that refuses it. Below them: `jpeg` (JPEG files without decoding),
`sixteen_bit` (what Pillow drops).

Imports only `errors` and `format`; no torch.
"""
