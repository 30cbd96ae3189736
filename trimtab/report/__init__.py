"""What a person looks at: one self-contained HTML page per run, made from the files the run left on disk."""
