"""A run on the machines of a Ray cluster. Nothing else of the project imports ray."""
