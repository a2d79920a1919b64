"""SLURM: what happens on the login node (slurm, freeze), in the batch script (job) and in each process (node)."""
