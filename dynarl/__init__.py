"""dynarl: reinforcement-learning post-training inside one Slurm allocation, on nodes that change role while it runs."""

__version__ = "0.1.0"
