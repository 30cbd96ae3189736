"""What a training job will need before it is started: memory by part, size of its micro-batches, time of a step.

One cost model: a device is a pool of one process, a split job is one pool, a cluster has several. `fake_model` runs
passes on fake tensors and counts live bytes, `memory` adds up what a process holds, `speed` what a step takes.
"""
