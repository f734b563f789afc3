"""A slow, plain reading of the alignment rules, and the logs to try it on."""
