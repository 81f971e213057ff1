"""LocalEngine decodes in this process: on a laptop, and as the reference for other engines.

Reading order:
    local_engine.py   LocalEngine and its settings
    decode_thread.py  the thread that decodes, and how it stops between two tokens
    running_batch.py  the slots of the batch
    sampler.py        logits to tokens and logprobs
    decoder.py        decodes with Hugging Face's code, if all layers keep key-values
    fast/             decodes Llama-like models, faster; a leaf, which LocalEngine finds by its entry point

May import: what engines/ may.
"""
