"""GCG attacks: search for a suffix that makes a model say something, then see what it says."""
