"""The fault matrix: the aligner under load, broken on purpose, judged by the oracle.

``python -m tests.faults`` runs it (``make faults``). The suite sees what anybody sees: worker
processes, topics and logs. ``registry`` lists the cases, ``scene`` is what a case plays in.
"""
