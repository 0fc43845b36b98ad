"""The service: a durable queue of products in front of the devices of one machine.

- `states`: the states of a job, and which follow which. Pure.
- `schedule`: which queued jobs start now, and why the others wait. Pure.
- `store`: the jobs, in an SQLite database. Each change of state is one transaction.
- `spec`: what a job computes, and what it needs. `planner`: the process that finds that out for the server.
- `job`: the process of one job.
- `launch`: starts such processes, and finds those that an earlier server started.
- `dispatcher`: the loop that ties these together.

How nothing is lost: a server that dies leaves the processes of its jobs running. Each of them holds a lock of
the operating-system kernel, which is free as soon as the process has ended, however it ended. The next server
asks for these locks, and never guesses from times. A job that died is started again with ``resume=True``, so
its finished tiles are kept.
"""
