"""LocalEngine decodes in this process: on a laptop, and as the reference for other engines.

Reading order:
    local_engine.py   LocalEngine and its settings
    decode_thread.py  the thread that decodes, and how it stops between two tokens
    running_batch.py  the slots of the batch
    sampler.py        logits to tokens and logprobs
    decoder.py        decodes with Hugging Face's code, if all layers keep key-values
    fast_decoder.py   decodes Llama-like models, faster; the weights of its products are kept packed
    kernels.py        its compiled part, built from kernels.cpp where there is a compiler

May import: what engines/ may.
"""
