"""The engine: runs a plan's schedule on a backend and on stores.

A tile's life
=============

This page follows one tile of C from the plan to the chunks that are written. The product is
``C = alpha op(A) @ op(B) + beta C``. A *tile* is a block of C, and a *strip* is some rows of it. A *panel* is
the block of A or B that one multiplication takes. A *slot* is a buffer, on the device or in host memory, for
one panel, tile or strip. A *lane* names the kind of work of an operation, such as reading.

1. *Plan.* `planning.search.planner` chooses the size of the tiles and the number of slots.
   `planning.schedule` yields the operations in program order. Each operation names the parts of slots
   (*regions*) that it reads and writes, the block of the operand that it copies, and its queue.
   `planning.lowering` decides once per run what the operations do.

2. *Dispatch.* `executor.Run._dispatch` iterates over the schedule.
   `planning.schedule.operation.HazardTracker.admit` compares regions to find the earlier operations that each
   operation must wait for. The operation is then queued. If too many operations are unfinished, the iteration
   pauses (backpressure). A short product in memory, and a longer one of pinned arrays (`executor.is_short`),
   has no threads: the calling thread starts its operations one after the other. If all arrays
   are pinned, and have the addresses that they had in the last run, the session makes the launches of the
   last run again (`backends.cuda.session`).

3. *Read* (lanes `read`, `decode`). `executor.Run._transfer` runs in a thread of the stream.
   `staging.Transfers.read` cuts the panel into parts (`staging.Cutter`). The reader threads read them from
   the store into a host slot (`staging.HostSlots`), which is then pinned. If host and device share one
   memory, the store reads into the device slot, and a panel in the caller's memory is not read at all
   (`Layout.in_place`). A GPU needs no Read for an array in host memory, unless the host computes checksums.

4. *Upload* (lane `h2d`). `executor.Run._submit` passes the panel's host memory to `Session.submit` of the
   backend: its host slot, or its block of an array in memory (`staging.host_block`). On CUDA,
   `backends.cuda.session` enqueues the copies from host slots and from arrays that their owner has pinned,
   and makes the h2d stream wait for the events of earlier operations. Blocks of pageable arrays are copied
   through a ring of pinned buffers (`backends.cuda.pageable`), which has threads and streams of its own.
   Their first Uploads begin before C is created (`executor.Prefetch`). If the product is like a recent one,
   they begin before the rest of the run is prepared (`jobs.run.run_again`). `submit` returns a token, the
   handle of the submitted operation. If beta != 0, the old C of the tile is read and uploaded in the same
   way, strip by strip.

5. *Prepare* (lane `prepare`; emulated and transformed products only). The two panels of a step are split into
   int8 residues: `backends.cuda.multiplier.Emulated.prepare` or `backends.host.residues.prepare`. Or a GPU
   transforms them: `backends.cuda.expander`. For a Gram matrix of one tile, it may first find the means and
   scales of the transform in the panel: `backends.cuda.expander.Measurer`.

6. *Multiply* (lane `compute`). It adds the product of two panels to the tile on the device. There is one
   Multiply per step along k. The last steps of a tile have one Multiply per strip, so that a finished strip
   is downloaded while later ones are multiplied. `backends.cuda.multiplier.Multiplier` launches cuBLAS or one
   of our own kernels (`kernels.ladder`). `backends.host.blas.gemm` calls the BLAS of NumPy.

7. *Finish* (lane `compute`; only if the tile on the device has a wider dtype than C or still lacks alpha and
   beta). It applies alpha and beta and casts a strip to C's dtype: `backends.cuda.launch.Kernels.finish`,
   `backends.host.finish.finish`. If only some elements of C are kept (`GemmProblem.selects`), it selects them
   instead: `backends.cuda.finisher`, `backends.host.finish`. The next stages then move only the selected
   elements.

8. *Download* (lane `d2h`). A strip is copied to a host slot (`staging.Staging.prepare_download`), or to a C
   in memory, directly or through the ring. The next tile starts as soon as strips of the device slot are
   free. If a Gram matrix is copied to a C in memory, the device first makes the strip Hermitian at the
   diagonal of C (`backends.cuda.finisher`). If all of C is stored, a second Download copies the transpose of
   the strip to the other triangle.

9. *Write* (lanes `encode`, `write`; not for strips that the device has copied to a C in memory). If the run
   is verified, `integrity.tile_checks` first checks the strip. A strip of a Gram matrix is then mirrored at
   the diagonal of C (`mirror`). `staging.Transfers.write` has the writer threads encode its chunks and write
   them. After the last strip of the tile, `Run` calls its callback `finished`. `jobs.resume.Committer` then
   makes the tile durable and records it in the journal.

10. *Record.* `executor.Run._collect` waits for the submitted operations in order. It turns each one into a
    span of the timeline (`timeline`): when the operation ran, on which lane, and which operations it waited
    for.

If a run uses several devices, `backends.registry` passes each operation to the session of its device
(`Operation.device`). Reads and Writes have one queue for all devices. A panel in a host slot is uploaded to
every device that needs it, and the next Read into the slot waits for all of these Uploads.

An error at any stage stops the run (`executor.Run._fail`), and cancels the operations that wait for the
failed one.
"""
