"""The service: a durable queue of jobs, each a call of a verb, in front of the devices of one machine.

- `protocol`: what server and clients agree on: states of jobs, actions, errors. Pure.
- `backfill`: which queued jobs start now, and why the others wait. Pure.
- `limits`: named folders and paths below them, the devices, and what all jobs together may occupy.
- `confinement`: what processes that open arrays may use.
- `job_store`: the jobs, in an SQLite database. Each change of state is one transaction.
- `job_spec`: a job as JSON: a verb, operands, the place of its result, and options. Pure.
- `job_arguments`: checks specs by the table of options, and makes the arguments of the verbs.
- `job_planner`: the plans of a job, and the process that plans jobs for the server.
- `job_worker`: the process that computes jobs, and the files of a job.
- `previews`: what a job shows of its result.
- `dispatcher`: the loop that starts jobs and notices how they end, and the workers that it keeps.
- `http`: the HTTP server. `page`: its page, for browsers.
- `client`: `Client` and `Job`, for users. `transport`: how they reach the server.

How nothing is lost: if a server dies, the processes of its jobs go on. Each of them holds a lock of the
operating-system kernel, which is free as soon as the process has ended, however it ended. The next server
asks who holds these locks, and never guesses from times. A job that died is started again with
``resume=True``, so its finished tiles are kept.
"""
