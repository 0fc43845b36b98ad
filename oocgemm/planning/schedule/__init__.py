"""The schedule: every operation of a run, the slots that it uses and the order of tiles and steps."""
