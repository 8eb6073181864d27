"""vLLM as the engine: a process tree in an interpreter of its own, which gets the learner's weights after each update.

`engine.VllmEngine` is what the trainer sees; `replica`, `connection` and `process` keep one engine alive; `weights` and `probe` give it the
learner's weights and check them; `host` is the program on the other side.
"""
