"""Compute one product with many processes, on one or many machines.

A *part* is a rectangle of tiles of one shared plan (`oocgemm.planning.parts`). A *worker* computes parts,
each in a child process. The *coordinator*, in the process of the caller, gives parts to workers.

**Only the coordinator writes to C and to its journal.** An attempt of a worker at a part has a folder of its
own inside the journal's folder. The child process writes the tiles of C there as redo files, and flushes
them. Then it adds the tile to the attempt's journal. The coordinator reads this journal, moves the files of
the tile to where a run in one process would have written them, and commits the tile as such a run does
(`oocgemm.jobs.journal`). So three things follow:

- A process that should have ended, but still runs, cannot damage C. Neither can two attempts at one part: of
  each tile, the coordinator takes the files of the first attempt that finished it, and ignores the others.
- A killed coordinator leaves what a killed run leaves, and attempts. A resumed run takes over the tiles that
  attempts have finished, if all their files are there, and removes all attempts.
- Workers need no locks, and the coordinator needs nothing from a worker but the files of its attempts. The
  result of the worker's task only says that the attempt has ended, and why.

A child process ends if its coordinator has ended, or says so, or cannot be seen for `fence.TTL` seconds
(`fence`). It also ends with its worker (`watchdog`). One that has opened a GPU stays for the next tasks
(`child`).

Modules: `part` is the entry point of the child process. `worker` has the function that runs in a worker.
`crew` has the workers in threads of this process and in executors, `cluster` those of a dask cluster.
`survey` checks the workers before anything is written. `window` decides which worker computes which part.
`coordinator` drives all of it.
"""
