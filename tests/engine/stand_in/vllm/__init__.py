"""Not vLLM: the one function of it that SGLang's rotary embedding asks for on a CPU.

On the path of the SGLang runs alone.
"""
