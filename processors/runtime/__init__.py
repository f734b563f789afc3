"""The runtime both processors share: batched Faust delivery over transactional state.

Faust stays app, worker, agent, rebalance, group membership and web; the unit of delivery is
a batch of one partition (``batches``), and a batch's outputs and state go out in one Kafka
transaction (``state``). ``partition`` ties both together for one input partition, ``worker``
builds the app and drives the partitions it owns, ``process`` runs it. A processor implements
``records.PartitionProcessor`` and stays free of all of this.
"""
