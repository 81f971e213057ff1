"""LocalEngine's fast path, for Llama-like models; it asks checks/entry_points.py for `fast_decoder`.

Reading order:
    decoder.py  LlamaDecoder; the weights of its products are kept packed
    kernels.py  its compiled part, built from kernels.cpp where there is a compiler

May import: what engines/ may.
"""

from lightrl.engines.local.fast.decoder import fast_decoder

__all__ = ["fast_decoder"]
