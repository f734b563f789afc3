"""A part of the log trained on once more, beside the live learner, into one candidate version."""
