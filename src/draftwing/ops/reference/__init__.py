"""The bookkeeping of drafts in torch: what C and Triton both do, said so that it can be read.

It is what their kernels are tested against, and runs where there are none: on a CPU without the extension, on a GPU
without Triton. What a device without kernels of its own needs besides is in `ops.torch`.
"""
