"""Many engines for one job: who gets which rows, what a replica does with them, and replicas as Ray actors."""
