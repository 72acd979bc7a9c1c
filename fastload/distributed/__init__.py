"""Rank and world size of this process, and numbers that ranks agree on.

Input: a `share` option, torch.distributed's process group, the environment. Output: a `Share` (rank, world size),
and the largest or least of the numbers that all ranks give.

Read first: `ranks` (works without torch), then `consensus` (numbers, texts and nodes;
imports torch.distributed).

Imports only `errors` and `system`.
"""
