"""What a training job will need before it is started: memory by part, the size of its passes, the time of a step.

The memory of a pass is not computed from a formula for each architecture. The pass itself is run, forwards and
backwards, on tensors without contents (pretended.py), and the bytes that are alive are counted (live.py).
"""
