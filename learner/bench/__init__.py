"""What the learner's benches measure: whether it learns, how fast, whether a GPU is used."""
