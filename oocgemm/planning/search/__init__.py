"""The planner: candidates, their scores, and the choice."""
