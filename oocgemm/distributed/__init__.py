"""Compute one product with many processes, on one or many machines.

A *part* is a set of tiles of one shared plan (`oocgemm.planning.partition`). A *worker* computes parts,
each in a child process. The *coordinator*, in the process of the caller, gives parts to workers.

**Only the coordinator writes to C and to its journal.** An attempt of a worker at a part has a folder of its
own inside the journal's folder. The child process writes the tiles of C there as redo files, and flushes
them. Then it adds the tile to the attempt's journal. The coordinator reads this journal, moves the files of
the tile to where a run in one process would have written them, and commits the tile like such a run
(`oocgemm.jobs.journal`). Three things follow:

- A process that should have ended, but still runs, cannot damage C. Neither can two attempts at one part: the
  coordinator takes the files of a tile from the first attempt that finished the tile, and ignores the others.
- A killed coordinator leaves the same files as a killed run, and attempts. A resumed run takes over the tiles
  that attempts have finished, if all their files are there, and removes all attempts.
- Workers need no locks, and the coordinator needs nothing from a worker but the files of its attempts. The
  result of the worker's task only says that the attempt has ended, and why.

If C is not stored, an attempt writes a *state* in place of redo files, such as sums of rows, when all of its
tiles are finished (`attempts`).

A child process ends if its coordinator has ended, or says so, or cannot be seen for `attempts.TTL` seconds.
It also ends with its worker (`child.Watch`). A child process that has opened a GPU stays for the next tasks
(`processes`).

Modules: `distribute` is the entry point in the process of the caller. `survey` checks the workers before
anything is written. `crew` has the workers: threads of this process, an executor, or a dask cluster.
`coordinator` decides which worker computes which part, and drives all of it. `slices` adds the partial
products of a divided k. `tasks` has the data that is sent to workers,
`processes` the code that runs in a worker, and `child` the code that runs in its child processes. `attempts`
has the files that coordinator and child processes share.
"""
