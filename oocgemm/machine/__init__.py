"""The machine: what it has, and what it can do."""
