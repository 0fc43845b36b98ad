"""Keep the jobs of the service inside the folders that they may use.

- `paths`: named roots, and paths below them. Checks what a user writes, at submission.
- `landlock`: restricts a process to some folders. The operating-system kernel enforces this while a job runs.
- `process`: restricts a worker or a planner.

A path that was checked can be replaced by a symbolic link before a job opens it. A chunk of an array can be
such a link from the start. So the check serves clear messages only, and Landlock is the boundary.
"""
