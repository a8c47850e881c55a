"""Attention and pointwise kernels over a paged KV cache, behind one interface.

Usable alone: knows tensors, nothing of chatserve. `interface` says what a backend offers, `reference` is the
slow truth, `torch_backend` is what runs on CPUs.
"""
