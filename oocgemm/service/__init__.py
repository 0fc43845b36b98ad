"""The service: a durable queue of products in front of the devices of one machine.

- `protocol`: what server and clients agree on: states of jobs, actions, errors. Pure.
- `backfill`: which queued jobs start now, and why the others wait. Pure.
- `limits`: the devices of the machine, and what all jobs together may occupy.
- `job_store`: the jobs, in an SQLite database. Each change of state is one transaction.
- `job_planner`: what a job computes, and the process that finds out for the server what it needs.
- `job_worker`: the process that computes jobs, and the files of a job.
- `worker_pool`: starts such processes, and finds those that an earlier server started.
- `dispatcher`: the loop that ties these together.
- `roots`: named folders, and paths below them. `confinement`: what processes that open arrays may use.
- `http`: the HTTP server. `page`: its page, for browsers.
- `client`: `Client` and `Job`, for users. `transport`: how they reach the server.

How nothing is lost: a server that dies leaves the processes of its jobs running. Each of them holds a lock of
the operating-system kernel, which is free as soon as the process has ended, however it ended. The next server
asks for these locks, and never guesses from times. A job that died is started again with ``resume=True``, so
its finished tiles are kept.
"""
