"""The planner: enumerate candidates (tile shapes, buffers, traversals), predict their times, choose one."""
