"""The planner: enumerate candidates (tile shapes, slots, traversals), predict their times, choose one."""
