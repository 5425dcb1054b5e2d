"""Ray: tasks and actors on the nodes of a cluster, and file transfer. Needs the extra `cluster`."""
