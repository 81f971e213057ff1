"""LocalEngine decodes in this process. It is meant for laptops, and is the reference for other engines.

Reading order:
    local_engine.py   LocalEngine and its settings
    decode_thread.py  the thread that decodes, and how it stops between two tokens
    running_batch.py  the slots in the batch; samples tokens from logits
    decoder.py        the protocol for decoders, and a decoder that runs Hugging Face's code
    fast/             a faster decoder for Llama-like models, found through its entry point

May import: the same as engines/.
"""
