"""Ray: tasks and actors on the nodes of a cluster, and what travels to them. Optional; the extra `cluster`."""
