"""The machine: what it is, and what it does when it is measured."""
