"""LocalEngine's fast path for Llama-like models; the engine gets `fast_decoder` from checks/entry_points.py.

Reading order:
    decoder.py  LlamaDecoder, which keeps the weights of its matrix products packed
    kernels.py  its compiled part, built from kernels.cpp if there is a compiler

May import: the same as engines/.
"""

from lightrl.engines.local.fast.decoder import fast_decoder

__all__ = ["fast_decoder"]
