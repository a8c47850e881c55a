"""C++ kernels for CPUs: compiled on the machine they run on, bound with ctypes.

`build` compiles, `library` binds, `weights` lays out quantised matrices, `decoder` runs a whole network in one call,
`backend` offers attention behind `chatserve_kernels.interface`. Everything else works without this package.
"""
