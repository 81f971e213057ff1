"""LocalEngine's fast path for Llama-like models; the engine finds `fast_decoder` through checks/entry_points.py.

Reading order:
    decoder.py  LlamaDecoder, which packs weights for the kernels
    kernels.py  its compiled kernels, built from kernels.cpp if there is a compiler

May import: the same as engines/.
"""

from lightrl.engines.local.fast.decoder import fast_decoder

__all__ = ["fast_decoder"]
