"""Asynchronous training: answers outlive the update of the weights that began them.

`ledger` decides who is written and who is trained, by numbers alone; `supply` has it done; `watchdog` notices that
nothing is done any more; `groups` are the groups that are not trained yet, in memory and in a checkpoint.
"""
