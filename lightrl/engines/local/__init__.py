"""LocalEngine decodes in this process: on a laptop, and as the reference for other engines.

Reading order:
    local_engine.py   LocalEngine and its settings
    decode_thread.py  the thread that decodes, and how it stops between two tokens
    running_batch.py  the slots of the batch; logits to tokens and logprobs
    decoder.py        the protocol of decoders, and one that runs Hugging Face's code
    fast/             a faster decoder for Llama-like models; a leaf that LocalEngine finds by its entry point

May import: the same as engines/.
"""
