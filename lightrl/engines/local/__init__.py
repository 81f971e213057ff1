"""LocalEngine decodes in this process: on a laptop, and as the reference that other engines are compared with.

Reading order:
    local_engine.py   LocalEngine, its settings and its door
    decode_thread.py  the thread that decodes, and what stops it between two tokens
    copy_in.py        new weights into its model, all or none
    running_batch.py  the slots of the batch that is decoded
    sampler.py        logits to tokens and logprobs
    decoder.py        decodes with any Hugging Face model
    fast_decoder.py   decodes models of Llama's shape, faster

May import: what engines/ may.
"""
