"""What an RL job needs on a cluster: memory a device of every role, in each layout that the machines allow, and the
time of an iteration, part by part."""
