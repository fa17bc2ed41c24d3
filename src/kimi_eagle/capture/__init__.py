"""The verifier in vLLM: generate answers, extract hidden states, check them.

`engine.py` is what stages use; `connector.py` carries states out of vLLM; `probe.py` checks them;
`footprint.py` tells what a GPU must hold. Nothing here imports vLLM or torch until an engine is
opened.
"""
