"""The engine's side of the vLLM engine: a program that runs in vLLM's own interpreter, which need not have surogate-rl installed.

Everything here imports the standard library, torch and vLLM alone. The run starts it with this package's parent folder on the path
(`surogate_rl.rollouts.engines.vllm.process`), or the user does, on another machine (`main.py` says how).
"""
